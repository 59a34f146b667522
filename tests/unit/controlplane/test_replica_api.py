"""Reading vLLM: what its answers to a load mean. `tests/vllm` shows that these are its real answers."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx2
import pytest

from proxy.auth import Credentials
from proxy.controlplane.answer import Answer
from proxy.controlplane.replica_api import LoadOutcome, ReplicaApi, adapters, base_entries, load_outcome, read_facts


def refused(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"error": {"message": message, "type": "x", "param": None, "code": status}}))


def worker(error: str) -> Answer:
    text = f"Call to add_lora method failed: Worker failed with error '{error}', please check the stack trace above"
    return refused(500, text)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(200, "Success: LoRA adapter 'a' added successfully."), LoadOutcome.LOADED),
        (refused(404, "Loading lora a failed: No adapter found for <path>"), LoadOutcome.LATE),
        (worker("<path> doesn't contain tensors"), LoadOutcome.TORN),
        (worker("Error while deserializing header: incomplete metadata, file not fully covered"), LoadOutcome.TORN),
        (worker("Error while deserializing header: header too small"), LoadOutcome.TORN),
        (worker("Expecting ':' delimiter: line 1 column 22 (char 21)"), LoadOutcome.TORN),
        (worker("Expecting value: line 1 column 1 (char 0)"), LoadOutcome.TORN),
        (worker("LoRA rank 16 is greater than max_lora_rank 8."), LoadOutcome.REFUSED),
        (worker("vLLM does not yet support DoRA."), LoadOutcome.REFUSED),
        (refused(400, "The lora adapter 'a' has already been loaded."), LoadOutcome.ALREADY),
        (Answer(404, '{"detail":"Not Found"}'), LoadOutcome.REFUSED),
        (Answer(401, '{"error":"Unauthorized"}'), LoadOutcome.UNKNOWN),
        (Answer(None, "ReadTimeout"), LoadOutcome.UNKNOWN),
    ],
)
def test_what_an_answer_to_a_load_means(answer: Answer, outcome: LoadOutcome) -> None:
    assert load_outcome(answer) is outcome


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"error":{"message":"m","type":"t","param":null,"code":400}}', "m"),
        ('{"detail":"Not Found"}', "Not Found"),
        ('{"error":"Unauthorized"}', "Unauthorized"),
        ("plain", "plain"),
        ("[1]", "[1]"),
    ],
)
def test_all_error_shapes_are_read(text: str, message: str) -> None:
    assert Answer(400, text).message == message


def test_success_false_is_not_ok() -> None:
    assert not Answer(200, '{"success":false}').ok
    assert Answer(200, '{"success":true}').ok
    assert Answer(200, "").ok


MODELS: list[dict[str, Any]] = [
    {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 2048},
    {"id": "p-v1", "root": "/lora/p-v1", "parent": "base", "max_model_len": None},
]


def test_models_are_told_from_adapters() -> None:
    assert [entry["id"] for entry in base_entries(MODELS)] == ["base"]
    assert adapters(MODELS) == {"p-v1": "/lora/p-v1"}


def test_facts_of_a_replica_that_lacks_nothing() -> None:
    config = {
        "lora_config": {"max_loras": 6, "max_cpu_loras": 12, "max_lora_rank": 8},
        "parallel_config": {"data_parallel_size": 1, "world_size": 2},
        "instance_id": "abc",
    }
    facts = read_facts(MODELS, config, dev_mode=True, runtime_lora=True)
    assert facts.lacks == () and facts.model_names == ("base",)
    assert (facts.max_loras, facts.max_lora_rank, facts.world_size, facts.max_model_len) == (6, 8, 2, 2048)


@pytest.mark.parametrize(
    ("config", "flags", "flag", "blocks"),
    [
        ({"lora_config": {"max_loras": 6}}, {"runtime_lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", True),
        (None, {"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1", False),
        ({"lora_config": None}, {}, "--enable-lora", True),
        (
            {"lora_config": {"max_loras": 6}, "parallel_config": {"data_parallel_size": 2}},
            {},
            "--data-parallel-size 1",
            True,
        ),
    ],
)
def test_what_a_replica_lacks_names_the_flag(
    config: dict[str, Any] | None, flags: dict[str, bool], flag: str, blocks: bool
) -> None:
    facts = read_facts(MODELS, config, **{"dev_mode": True, "runtime_lora": True, **flags})
    (lack,) = facts.lacks
    assert flag in lack.message and lack.blocks_loads is blocks


def test_a_weight_call_may_keep_its_engine_busy_for_as_long_as_it_may_take_on_a_connection_of_its_own() -> None:
    async def scenario() -> None:
        seen: list[tuple[str, bool, str]] = []

        def answer(request: httpx2.Request) -> httpx2.Response:
            busy = api.engine_is_busy(0.0)
            seen.append((request.url.path, busy, request.headers["Connection"]))
            return httpx2.Response(200)

        client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
        credentials = Credentials(lambda: None)
        api = ReplicaApi(client, "http://replica", credentials=credentials, stall_s=1)
        async with client:
            await api.call("POST", "/collective_rpc", timeout_s=600)
            await api.call("POST", "/update_weights", timeout_s=math.inf)
            await api.call("POST", "/v1/load_lora_adapter")
            await api.call("GET", "/weight_info", timeout_s=5)
        assert seen == [
            ("/collective_rpc", True, "close"),
            ("/update_weights", True, "close"),
            ("/v1/load_lora_adapter", False, "keep-alive"),
            ("/weight_info", False, "keep-alive"),
        ]
        assert not api.engine_is_busy(1000), "nothing is under way"

    asyncio.run(scenario())
