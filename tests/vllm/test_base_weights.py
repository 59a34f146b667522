"""Base weights that a trainer sends to two real replicas through the proxy, over gloo in NCCL's place.

The trainer is this process: rank 0 of a group of three, whose other ranks the proxy has given out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from proxy.demo.processes import free_port
from tests.support.base_model import BaseModel
from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica, started, wait_until
from tests.support.tiny_model import REPO

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PLUGINS = REPO / "tests" / "support" / "gloo_transfer"
PROMPTS = [[100 + number, 200, 300, 40] for number in range(4)]
TOKENS = 6


@pytest.fixture(scope="module")
def pair() -> Iterator[list[VllmReplica]]:
    args = ("--weight-transfer-config", '{"backend": "gloo"}')
    with started([VllmReplica(args=args, plugins=PLUGINS) for _ in range(2)]) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def proxy(pair: list[VllmReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair), PROXY_WAIT_READY_S="2") as proxy:
        yield proxy


class Trainer(BaseModel):
    """Has the model, changes it, and sends it as TRL does."""

    def __init__(self, proxy: RunningProxy) -> None:
        super().__init__()
        self._client = proxy.client
        self._group: Any = None

    def wrote(self, answers: list[list[int]]) -> bool:
        """Tell whether these are the answers to PROMPTS."""
        return all(self.would_say(prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True))

    def join(self) -> None:
        """Make one group with all replicas."""
        transfer: Any = importlib.import_module("tests.support.gloo_transfer.gloo_transfer")
        port, size = free_port(), self._client.get("/get_world_size").json()["world_size"] + 1
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._post, "/init_weight_transfer_engine", {"init_info": info})
            self._group = transfer.Group.join("127.0.0.1", port, rank=0, world_size=size)
            assert answer.result().status_code == 200, answer.result().text

    def sync(self) -> None:
        """Bring the weights to every replica."""
        tensors = {name: weight.data.contiguous() for name, weight in self.model.named_parameters()}
        info = {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        self._post("/pause?mode=keep").raise_for_status()
        self._post("/start_weight_update", {"is_checkpoint_format": True}).raise_for_status()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._post, "/update_weights", {"update_info": info})
            for tensor in tensors.values():
                self._group.broadcast(tensor)
            assert answer.result().status_code == 200, answer.result().text
        self._post("/finish_weight_update").raise_for_status()
        self._post("/resume").raise_for_status()

    def _post(self, path: str, body: Any = None) -> httpx2.Response:
        return self._client.post(path, json=body, timeout=60)


def _ask(url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx2.post(f"{url}/v1/completions", json={"model": "tiny", **body}, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def _answers(url: str) -> list[list[int]]:
    return [_ask(url, prompt) for prompt in PROMPTS]


def test_three_syncs_reach_both_replicas_and_a_restarted_one_serves_nothing(
    pair: list[VllmReplica], proxy: RunningProxy
) -> None:
    trainer = Trainer(proxy)
    original = last = _answers(proxy.url)
    assert trainer.wrote(original)
    trainer.join()
    for step in range(1, 4):
        trainer.change(step)
        assert not trainer.wrote(last), "the step does not show"
        trainer.sync()
        for replica in pair:
            last = _answers(replica.url)
            assert trainer.wrote(last), f"step {step}: {replica} answers {last}"
            assert replica.client.get("/weight_info").json() == {"weight_version": str(step)}

    pair[1].kill()
    proxy.wait_states("ready", "down")
    pair[1].stop()
    pair[1].start()
    wait_until(lambda: proxy.states() == ["ready", "quarantined"], limit_s=60, what="it is known to have lost them")
    assert _answers(pair[1].url) == original, "it has the original weights"
    assert trainer.wrote(_answers(proxy.url))
    refused = proxy.client.post("/start_weight_update", json={})
    assert refused.status_code == 409 and pair[1].url in refused.text

    trainer.join()
    trainer.change(4)
    trainer.sync()
    proxy.wait_states("ready", "ready")
    for replica in pair:
        assert trainer.wrote(_answers(replica.url))
    wait_until(lambda: proxy.inflight() == 0, what="nothing in flight")
