"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator.adapters import write_adapter
from tests.support.adapters import write_broken
from tests.support.replicas import Replica

# Adapters that vLLM accepts although most of them are wrong. "nan" is served in test_contract_engine_death alone,
# because it spoils other answers of a real replica.
ACCEPTED = ["rank_pattern_4", "rslora", "wrong_names", "wrong_shape", "nan"]

REFUSED = {
    "no_weights": "<path> doesn't contain tensors",
    "truncated": "Error while deserializing header: incomplete metadata, file not fully covered",
    "half_header": "Error while deserializing header: invalid header length",
    "empty_weights": "Error while deserializing header: header too small",
    "bad_config": "Expecting ',' delimiter: line 1 column 22 (char 21)",
    "empty_config": "Expecting value: line 1 column 1 (char 0)",
    "rank_16": "LoRA rank 16 is greater than max_lora_rank 8.",
    "rank_pattern_16": "LoRA rank 16 is greater than max_lora_rank 8.",
    "rank_in_weights_16": "The size of tensor a (8) must match the size of tensor b (16) at non-singleton dimension 0",
    "dora": "vLLM does not yet support DoRA.",
    "modules_to_save": 'vLLM only supports modules_to_save being either None or ["classifier", "score"] for '
    "classification models. Unsupported modules_to_save: ['lm_head']",
    "bias": "Adapter bias is not supported.",
    "missing_a": "",
    "missing_b": "unsupported operand type(s) for *=: 'NoneType' and 'float'",
}


def error(message: str, *, type: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def worker_error(reason: str) -> dict[str, Any]:
    text = (
        f"Call to add_lora method failed: Worker failed with error '{reason}', "
        "please check the stack trace above for the root cause"
    )
    return error(text, type="InternalServerError", code=500)


def test_a_good_adapter_loads_and_answers_with_other_tokens_than_the_base_model(
    replica: Replica, adapter: Callable[..., Path], name: str
) -> None:
    path = adapter()
    answer = replica.load(name, path)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert "content-type" not in answer.headers
    assert replica.models()[name] == str(path)
    assert replica.complete(name) != replica.complete()


def test_equal_weights_answer_alike_and_others_differ(replica: Replica, loaded: Callable[..., str]) -> None:
    first, same, other = loaded(1), loaded(1), loaded(2)
    assert replica.complete(first) == replica.complete(same)
    assert replica.complete(first) != replica.complete(other)


@pytest.mark.parametrize("broken", ACCEPTED)
def test_accepted(replica: Replica, tmp_path: Path, name: str, broken: str) -> None:
    answer = replica.load(name, write_broken(tmp_path / broken, broken))
    assert answer.status_code == 200, answer.text
    assert name in replica.models()


@pytest.mark.parametrize("broken", REFUSED)
def test_refused_by_the_worker(replica: Replica, tmp_path: Path, name: str, broken: str) -> None:
    answer = replica.load(name, write_broken(tmp_path / broken, broken))
    assert (answer.status_code, answer.json()) == (500, worker_error(REFUSED[broken]))
    assert name not in replica.models()
    assert replica.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("broken", "module"), [("foreign_module", "model.layers.0.foo.bar_proj"), ("lm_head", "model.lm_head")]
)
def test_a_module_that_is_no_target_is_refused(
    replica: Replica, tmp_path: Path, name: str, broken: str, module: str
) -> None:
    answer = replica.load(name, write_broken(tmp_path / broken, broken))
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert "While loading <path>, expected target modules in {" in message
    assert f"but received ['{module}', '{module}']. Please verify that" in message


def test_a_directory_that_is_not_there_is_not_found(replica: Replica, name: str) -> None:
    for path, shown in [
        ("/nonexistent/x", "/nonexistent/x"),
        ("/tmp/nonexistent/x", "<path>"),
        ("/mnt/nonexistent/x", "<path>"),
        ("some-org/some-adapter", "some-org/some-adapter"),
        ("no/such/directory/at/all", "no/such/directory/at/all"),
    ]:
        answer = replica.load(name, path)
        text = f"Loading lora {name} failed: No adapter found for {shown}"
        assert (answer.status_code, answer.json()) == (404, error(text, type="NotFoundError", code=404))
    assert name not in replica.models()


def test_a_directory_without_a_config_is_not_found(replica: Replica, tmp_path: Path, name: str) -> None:
    answer = replica.load(name, write_broken(tmp_path / "adapter", "no_config"))
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"Loading lora {name} failed: No adapter found for <path>"


def test_a_path_that_is_a_file_is_refused(replica: Replica, adapter: Callable[..., Path], name: str) -> None:
    answer = replica.load(name, adapter() / "adapter_config.json")
    assert (answer.status_code, answer.json()) == (500, worker_error("[Errno 20] Not a directory: '<path>'"))


def test_a_refused_name_can_be_loaded_later(replica: Replica, tmp_path: Path, name: str) -> None:
    directory = write_broken(tmp_path / "late", "no_weights")
    assert replica.load(name, directory).status_code == 500
    write_adapter(directory, seed=1)
    assert replica.load(name, directory).status_code == 200


def test_unusual_paths_and_names_are_accepted(replica: Replica, adapter: Callable[..., Path], name: str) -> None:
    path = adapter()
    cases = {
        f"{name}-dots": f"{path.parent}/nothing/../{path.name}",
        f"{name}-slash": f"{path}/",
        f'{name} we ird/na"me é': str(path),
        f"{name}-{'n' * 5000}": str(path),
    }
    (path.parent / "nothing").mkdir()
    for odd_name, odd_path in cases.items():
        assert replica.load(odd_name, odd_path).status_code == 200
        assert replica.models()[odd_name] == odd_path


def test_a_name_is_loaded_once(replica: Replica, adapter: Callable[..., Path], name: str) -> None:
    path = adapter(1)
    replica.load(name, path)
    text = (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    for again in (path, adapter(2)):
        answer = replica.load(name, again)
        assert (answer.status_code, answer.json()) == (400, error(text, type="InvalidUserInput", code=400))
    assert replica.models()[name] == str(path)


def test_the_base_models_name_is_taken(replica: Replica, adapter: Callable[..., Path]) -> None:
    answer = replica.load(replica.base_model, adapter())
    text = f"The lora adapter '{replica.base_model}' conflicts with a served base model."
    assert (answer.status_code, answer.json()) == (400, error(text, type="InvalidUserInput", code=400))


def test_name_and_path_must_be_there(replica: Replica, name: str) -> None:
    for given_name, path in [("", "/x"), (name, "")]:
        answer = replica.load(given_name, path)
        text = "Both 'lora_name' and 'lora_path' must be provided."
        assert (answer.status_code, answer.json()) == (400, error(text, type="InvalidUserInput", code=400))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "/x"}, "body.lora_name"),
        ({"lora_name": "x"}, "body.lora_path"),
        ({}, "body.lora_name"),
        ({"lora_name": 5, "lora_path": "/x"}, "body.lora_name"),
        ([], "body"),
    ],
)
def test_a_body_that_does_not_fit_is_a_bad_request(replica: Replica, body: object, param: str) -> None:
    answer = replica.client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "Bad Request"
    assert answer.json()["error"]["param"] == param


def test_the_text_of_a_missing_field(replica: Replica) -> None:
    answer = replica.client.post("/v1/load_lora_adapter", json={"lora_path": "/x"})
    found = "{'type': 'missing', 'loc': 'body.lora_name', 'msg': 'Field required', 'input': '<dict of 1 items>'}"
    assert answer.json()["error"]["message"] == f"1 validation error:\n  {found}"


def test_a_body_must_be_json_and_say_so(replica: Replica) -> None:
    for content_type in ({"content-type": "text/plain"}, {}):
        answer = replica.client.post("/v1/load_lora_adapter", content=b'{"lora_name": "x"}', headers=content_type)
        assert answer.status_code == 400
        assert "Unsupported Media Type: Only 'application/json' is allowed" in answer.json()["error"]["message"]
    answer = replica.client.post(
        "/v1/load_lora_adapter", content=b'{"lora_name":', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "body.13"
    assert "'msg': 'JSON decode error'" in answer.json()["error"]["message"]


def test_unknown_fields_are_ignored(replica: Replica, adapter: Callable[..., Path], name: str) -> None:
    assert replica.load(name, adapter(), foo=1, policy={"run": "x"}).status_code == 200


def test_of_concurrent_loads_of_one_name_one_succeeds(
    replica: Replica, adapter: Callable[..., Path], name: str
) -> None:
    path = adapter()
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: replica.load(name, path), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400, 400, 400]


def test_loading_in_place_is_sticky(replica: Replica, adapter: Callable[..., Path], name: str) -> None:
    path = adapter(1)
    answers = {seed: replica.complete(_load(replica, f"{name}-{seed}", adapter(seed))) for seed in (1, 2, 3)}
    _load(replica, name, path)
    assert replica.complete(name) == answers[1]
    write_adapter(path, seed=2)
    assert replica.complete(name) == answers[1]  # files that change under a loaded adapter are not looked at
    assert replica.load(name, path, load_inplace=True).status_code == 200
    replica.client.post("/reset_prefix_cache")
    assert replica.complete(name) == answers[2]
    write_adapter(path, seed=3)
    assert replica.complete(name) == answers[3]  # but now they are
    replica.unload(name)


def test_loading_in_place_works_for_a_new_name_and_may_change_the_path(
    replica: Replica, adapter: Callable[..., Path], name: str
) -> None:
    assert replica.load(name, adapter(1), load_inplace=True).status_code == 200
    other = adapter(2)
    assert replica.load(name, other, load_inplace=True).status_code == 200
    assert replica.models()[name] == str(other)


def test_an_evicted_adapter_is_read_again_with_whatever_its_files_hold_then(
    replica: Replica, adapter: Callable[..., Path], loaded: Callable[..., str], name: str
) -> None:
    path = adapter(1)
    _load(replica, name, path)
    before = replica.complete(name)
    write_adapter(path, seed=2)
    assert replica.complete(name) == before
    others = [loaded(seed) for seed in (2, 4, 5, 6)]  # max_cpu_loras is 4
    changed = replica.complete(others[0])
    replica.client.post("/reset_prefix_cache")
    assert replica.complete(name) == changed


def test_unload(replica: Replica, loaded: Callable[..., str]) -> None:
    name = loaded()
    answer = replica.unload(name)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")
    assert name not in replica.models()
    for unknown in (name, replica.base_model):
        answer = replica.unload(unknown)
        text = f"The lora adapter '{unknown}' cannot be found."
        assert (answer.status_code, answer.json()) == (404, error(text, type="NotFoundError", code=404))


def test_unload_needs_a_name(replica: Replica) -> None:
    answer = replica.unload("")
    text = "'lora_name' needs to be provided to unload a LoRA adapter."
    assert (answer.status_code, answer.json()) == (400, error(text, type="InvalidUserInput", code=400))
    answer = replica.client.post("/v1/unload_lora_adapter", json={})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body.lora_name")


def test_what_is_in_flight_finishes_on_the_old_weights(
    replica: Replica, adapter: Callable[..., Path], name: str
) -> None:
    path = adapter(1)
    _load(replica, name, path)
    undisturbed = replica.complete(name, max_tokens=1900)
    with replica.in_flight(name, n=1, max_tokens=1900, temperature=0, return_token_ids=True) as sent:
        assert replica.unload(name).status_code == 200
        shutil.rmtree(path)
        assert replica.load(name, adapter(2)).status_code == 200
        answer = sent.result().json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert answer["token_ids"] == undisturbed


def _load(replica: Replica, name: str, path: Path) -> str:
    answer = replica.load(name, path)
    assert answer.status_code == 200, answer.text
    return name
