"""POST /v1/completions and /v1/chat/completions: bodies, streams and errors, field by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.replicas import Replica

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}


def chat(replica: Replica, model: str | None = None, **fields: Any) -> dict[str, Any]:
    body = {**CHAT, **fields} if model is None else {"model": model, **CHAT, **fields}
    answer = replica.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(text: str) -> list[dict[str, Any]]:
    pieces = text.split("\n\n")
    assert pieces.pop() == ""
    assert pieces.pop() == "data: [DONE]"
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def failure(replica: Replica, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = replica.completion(**fields)
    return answer.status_code, answer.json()["error"]


def test_a_completion_as_trl_asks_for_it(replica: Replica, loaded: Callable[..., str]) -> None:
    name = loaded()
    answer = replica.completion(
        name,
        prompt=[100, 200, 300],
        max_tokens=4,
        n=1,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        seed=2**62 + 1,
        logprobs=0,
        return_token_ids=True,
    )
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json()
    assert set(body) == {
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "kv_transfer_params", "ec_transfer_params", "metrics",
    }  # fmt: skip
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == name
    assert body["system_fingerprint"].startswith("vllm-0.32.0-")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 7,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }
    (choice,) = body["choices"]
    assert set(choice) == {
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
        "prompt_token_ids", "routed_experts",
    }  # fmt: skip
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["prompt_token_ids"] == [100, 200, 300]
    assert len(choice["token_ids"]) == 4
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert all(len(values) == 4 for values in logprobs.values())
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top == {token: logprob}


def test_a_seed_decides_the_answer(replica: Replica) -> None:
    def drawn(seed: int) -> list[int]:
        return replica.complete(temperature=1, seed=seed)

    assert drawn(42) == drawn(42)
    assert drawn(42) != drawn(43)


def test_choice_i_is_drawn_with_seed_plus_i(replica: Replica) -> None:
    answer = replica.completion(n=2, temperature=1, seed=5, return_token_ids=True).json()
    first, second = (choice["token_ids"] for choice in answer["choices"])
    assert second == replica.complete(temperature=1, seed=6)
    assert first == replica.complete(temperature=1, seed=5)


def test_max_tokens_is_16_unless_given(replica: Replica) -> None:
    answer = replica.client.post("/v1/completions", json={"prompt": "abc", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_token_ids_and_logprobs_are_told_only_when_asked_for(replica: Replica) -> None:
    (choice,) = replica.completion().json()["choices"]
    assert choice["token_ids"] is None
    assert choice["prompt_token_ids"] is None
    assert choice["logprobs"] is None


def test_logprobs_1_tells_one_more_token_or_the_same(replica: Replica) -> None:
    (choice,) = replica.completion(logprobs=1, temperature=1, seed=3).json()["choices"]
    assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])


def test_tokens_can_be_shown_as_ids(replica: Replica) -> None:
    (choice,) = replica.completion(logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


def test_prompt_logprobs(replica: Replica) -> None:
    (choice,) = replica.completion(prompt=[100, 200, 300], prompt_logprobs=0, max_tokens=1).json()["choices"]
    nothing, *told = choice["prompt_logprobs"]
    assert nothing is None
    assert [list(entry) for entry in told] == [["200"], ["300"]]
    for entry in told:
        (value,) = entry.values()
        assert set(value) == {"logprob", "rank", "decoded_token"}
        assert value["logprob"] < 0


def test_several_prompts_and_choices(replica: Replica) -> None:
    answer = replica.completion(
        prompt=[[100, 200, 300], [7, 8]], n=2, temperature=1, max_tokens=2, return_token_ids=True
    ).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[100, 200, 300]] * 2 + [[7, 8]] * 2
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 8, 13)


def test_text_prompts(replica: Replica) -> None:
    for prompt, count in [("ab", 1), (["ab", "cd"], 2)]:
        assert len(replica.completion(prompt=prompt).json()["choices"]) == count


def test_a_request_without_a_model_gets_the_base_model(replica: Replica) -> None:
    for model in (None, replica.base_model):
        answer = replica.completion(model)
        assert answer.json()["model"] == replica.base_model
    assert replica.completion(model=None).json()["model"] == replica.base_model


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_model(replica: Replica, path: str, stream: bool) -> None:
    body = {"model": "nope", "prompt": "x", "messages": CHAT["messages"], "max_tokens": 2, "stream": stream}
    answer = replica.client.post(path, json=body)
    text = f"The model `nope` does not exist. Valid aliases: {replica.base_model}."
    error = {"message": text, "type": "NotFoundError", "param": "model", "code": 404}
    assert (answer.status_code, answer.json()) == (404, {"error": error})


def test_the_request_id_becomes_part_of_the_answers_id(replica: Replica) -> None:
    answer = replica.client.post(
        "/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers={"x-request-id": "my-id"}
    )
    assert answer.json()["id"] == "cmpl-my-id"


def test_a_prompt_may_fill_all_but_one_token(replica: Replica) -> None:
    assert replica.completion(prompt=[5] * 2040, max_tokens=100).json()["usage"]["completion_tokens"] == 8
    status, error = failure(replica, prompt=[5] * 2048)
    assert status == 400
    assert error["message"] == "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
    status, error = failure(replica, prompt=[5] * 2100)
    assert (status, error["param"]) == (400, "input_tokens")
    assert error["message"].startswith(
        "This model's maximum context length is 2048 tokens. However, your prompt contains 2100 input tokens, "
        "which exceeds this limit even without any output tokens."
    )


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"prompt": [5, 99999]}, "Token id 99999 is out of vocabulary", None),
        ({"prompt": []}, "You must pass at least one prompt", None),
        ({"prompt": [[]]}, "The decoder prompt cannot be empty", None),
        (
            {"prompt": ""},
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
            "prompt",
        ),
        (
            {"logprobs": 50},
            "Requested sample logprobs of 50, which is greater than max allowed: 20 (parameter=logprobs, value=50)",
            "logprobs",
        ),
        (
            {"temperature": -1},
            "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
            "temperature",
        ),
        (
            {"max_tokens": 0},
            "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
            "max_tokens",
        ),
        ({"n": 0}, "n must be at least 1, got 0.", None),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2.", None),
    ],
)
def test_what_cannot_be_sampled(replica: Replica, fields: dict[str, Any], message: str, param: str | None) -> None:
    expected = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    assert failure(replica, **fields) == (400, expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5, -1]}, "body.prompt.1"),
        ({"prompt": [1.5]}, "body.prompt.0"),
        ({"prompt": {}}, "body.prompt"),
        ({"max_tokens": "x"}, "body.max_tokens"),
    ],
)
def test_what_does_not_fit_the_schema(replica: Replica, fields: dict[str, Any], param: str) -> None:
    status, error = failure(replica, **fields)
    assert (status, error["type"], error["param"]) == (400, "Bad Request", param)


def test_a_body_that_is_no_json(replica: Replica) -> None:
    answer = replica.client.post("/v1/completions", content=b'{"model":', headers={"content-type": "application/json"})
    found = (
        "{'type': 'json_invalid', 'loc': 'body.9', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', "
        "'ctx': {'error': 'Expecting value'}}"
    )
    expected = {"message": f"1 validation error:\n  {found}", "type": "Bad Request", "param": "body.9", "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": expected})


def test_a_stream(replica: Replica) -> None:
    answer = replica.completion(stream=True, max_tokens=3, logprobs=0, return_token_ids=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    pieces = events(answer.text)
    choices = [piece["choices"][0] for piece in pieces]
    assert [token for choice in choices for token in choice["token_ids"]] == replica.complete(max_tokens=3)
    assert choices[0]["prompt_token_ids"] == [100, 200, 300]
    assert all(choice["prompt_token_ids"] is None for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert ["system_fingerprint" in piece for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert set(choices[0]) == {
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"
    }  # fmt: skip
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_a_stream_with_usage(replica: Replica) -> None:
    pieces = events(replica.completion(stream=True, max_tokens=2, stream_options={"include_usage": True}).text)
    *before, last = pieces
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert ["system_fingerprint" in piece for piece in pieces] == [False] * len(before) + [True]


def test_a_stream_of_two_choices(replica: Replica) -> None:
    pieces = events(replica.completion(stream=True, max_tokens=2, n=2, temperature=1, return_token_ids=True).text)
    for index in (0, 1):
        own = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert sum(len(choice["token_ids"]) for choice in own) == 2
        assert own[-1]["finish_reason"] == "length"


def test_a_chat(replica: Replica, loaded: Callable[..., str]) -> None:
    name = loaded()
    body = chat(replica, name, logprobs=True, top_logprobs=0, return_token_ids=True, temperature=0)
    assert set(body) == {
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics",
    }  # fmt: skip
    assert (body["object"], body["model"]) == ("chat.completion", name)
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert set(choice) == {
        "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"
    }  # fmt: skip
    assert set(choice["message"]) == {
        "role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"
    }  # fmt: skip
    assert choice["message"]["role"] == "assistant"
    assert len(choice["token_ids"]) == 3
    for entry in choice["logprobs"]["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["top_logprobs"] == []
    assert body["usage"]["prompt_tokens"] == len(body["prompt_token_ids"])


def test_a_chat_tells_cached_and_added_tokens(replica: Replica, prompt: list[int]) -> None:
    messages = [{"role": "user", "content": " ".join(map(str, prompt))}]
    details = [chat(replica, messages=messages)["usage"] for _ in range(2)]
    whole_blocks = details[0]["prompt_tokens"] // 32 * 32
    first, second = (usage["prompt_tokens_details"] for usage in details)
    assert first["cached_tokens"] + first["created_cache_tokens"] == whole_blocks
    assert second["cached_tokens"] >= whole_blocks - 32
    assert second["cached_tokens"] + second["created_cache_tokens"] == whole_blocks


def test_a_chat_as_a_stream(replica: Replica) -> None:
    body = {**CHAT, "stream": True, "logprobs": True, "return_token_ids": True}
    answer = replica.client.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    opening, *pieces = events(answer.text)
    assert opening["object"] == "chat.completion.chunk"
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["prompt_token_ids"]
    choices = [piece["choices"][0] for piece in pieces]
    assert sum(len(choice["token_ids"]) for choice in choices) == 3
    assert choices[-1]["finish_reason"] == "length"
    assert all(set(choice["delta"]) == {"content"} for choice in choices)
    assert "system_fingerprint" in pieces[-1]


def test_a_chat_needs_messages(replica: Replica) -> None:
    answer = replica.client.post("/v1/chat/completions", json={"model": replica.base_model})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body.messages")


def test_tokenize_and_detokenize(replica: Replica) -> None:
    answer = replica.client.post("/tokenize", json={"prompt": "hello world"}).json()
    assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048
    assert replica.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hello world"}
    chat_tokens = replica.client.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    assert chat_tokens == chat(replica, return_token_ids=True)["prompt_token_ids"]
    assert replica.client.post("/tokenize", json={"model": "nope", "prompt": "x"}).status_code == 404
