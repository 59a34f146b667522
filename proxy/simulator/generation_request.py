"""What a client asks for in a completion or a chat, read and checked as vLLM does."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from proxy.simulator.asgi import Refusal
from proxy.simulator.settings import SimulatorSettings
from proxy.simulator.tokens import chat_tokens, tokenize

_DEFAULT_MAX_TOKENS = 16
_MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request, whichever of the two kinds."""

    model: str | None
    prompts: list[list[int]]
    max_tokens: int | None
    """None means as many as fit."""
    n: int
    seed: int | None
    salt: str
    stream: bool
    include_usage: bool
    logprobs: int | None
    """How many of the most likely tokens to tell besides the sampled one."""
    prompt_logprobs: int | None
    token_ids: bool
    """return_token_ids"""
    tokens_as_ids: bool
    """return_tokens_as_token_ids"""

    def tokens_left(self, prompt: list[int], settings: SimulatorSettings) -> int:
        """Return how many tokens the answer to this prompt may have."""
        room = settings.max_model_len - len(prompt)
        return room if self.max_tokens is None else min(self.max_tokens, room)


def read_completion(body: dict[str, Any], settings: SimulatorSettings) -> GenerationRequest:
    """Read a POST /v1/completions. Raises Refusal."""
    max_tokens = _integer(body, "max_tokens")
    return _read(
        body,
        settings,
        prompts=_prompts(body.get("prompt")),
        logprobs=_integer(body, "logprobs"),
        max_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
    )


def read_chat(body: dict[str, Any], settings: SimulatorSettings) -> GenerationRequest:
    """Read a POST /v1/chat/completions. Raises Refusal."""
    if "messages" not in body:
        raise Refusal.missing("messages", body=body)
    return _read(
        body,
        settings,
        prompts=[chat_prompt(body["messages"])],
        logprobs=(_integer(body, "top_logprobs") or 0) if body.get("logprobs") else None,
        max_tokens=_integer(body, "max_completion_tokens") or _integer(body, "max_tokens"),
    )


def chat_prompt(messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a chat; the parts of a message's content are joined."""
    return chat_tokens((str(message.get("role", "user")), _content(message.get("content"))) for message in messages)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def _read(
    body: dict[str, Any],
    settings: SimulatorSettings,
    *,
    prompts: list[list[int]],
    logprobs: int | None,
    max_tokens: int | None,
) -> GenerationRequest:
    n = _integer(body, "n")
    n = 1 if n is None else n
    for prompt in prompts:
        _check_prompt(prompt, settings)
        room = settings.max_model_len - len(prompt)
        _check_tokens(room if max_tokens is None else min(max_tokens, room))
    _check_sampling(body, logprobs, n)
    stream = bool(body.get("stream"))
    return GenerationRequest(
        model=body.get("model"),
        prompts=prompts,
        max_tokens=max_tokens,
        n=n,
        seed=_integer(body, "seed"),
        salt=body.get("cache_salt") or "",
        stream=stream,
        include_usage=stream and bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=logprobs,
        prompt_logprobs=_integer(body, "prompt_logprobs"),
        token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
    )


def _prompts(prompt: Any) -> list[list[int]]:
    if prompt is None or prompt == "":
        raise _bad("Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt")
    if isinstance(prompt, str):
        return [tokenize(prompt)]
    if not isinstance(prompt, list):
        raise Refusal.wrong("body.prompt", prompt, type="list_type", message="Input should be a valid list")
    if not prompt:
        raise _bad("You must pass at least one prompt")
    if isinstance(prompt[0], str | list):
        return [tokenize(one) if isinstance(one, str) else one for one in prompt]
    return [prompt]


def _check_prompt(prompt: list[int], settings: SimulatorSettings) -> None:
    try:
        array("Q", prompt)
    except (TypeError, OverflowError) as error:
        # vLLM lists the problems under every type that a prompt may have; the first one is enough to recognise it.
        position, token = next((at, it) for at, it in enumerate(prompt) if type(it) is not int or it < 0)
        kind, message = "greater_than_equal", "Input should be greater than or equal to 0"
        if type(token) is not int:
            kind, message = "int_type", "Input should be a valid integer"
        raise Refusal.wrong(f"body.prompt.{position}", token, type=kind, message=message) from error
    if not prompt:
        raise _bad("The decoder prompt cannot be empty")
    if (largest := max(prompt)) >= settings.vocab_size:
        raise _bad(f"Token id {largest} is out of vocabulary")
    if len(prompt) > settings.max_model_len:
        raise _bad(
            f"This model's maximum context length is {settings.max_model_len} tokens. However, your prompt contains "
            f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
            f"length of the input prompt. (parameter=input_tokens, value={len(prompt)})",
            param="input_tokens",
        )


def _check_tokens(max_tokens: int) -> None:
    if max_tokens < 1:
        text = f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})"
        raise _bad(text, param="max_tokens")


def _check_sampling(body: dict[str, Any], logprobs: int | None, n: int) -> None:
    if n < 1:
        raise _bad(f"n must be at least 1, got {n}.")
    if logprobs is not None and logprobs > _MAX_LOGPROBS:
        raise _bad(
            f"Requested sample logprobs of {logprobs}, which is greater than max allowed: {_MAX_LOGPROBS} "
            f"(parameter=logprobs, value={logprobs})",
            param="logprobs",
        )
    temperature = body.get("temperature")
    if temperature is not None and temperature < 0:
        shown = float(temperature)
        text = f"temperature must be non-negative, got {shown}. (parameter=temperature, value={shown})"
        raise _bad(text, param="temperature")
    if temperature == 0 and n > 1:
        raise _bad(f"n must be 1 when using greedy sampling, got {n}.")


def _integer(body: dict[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is None or type(value) is int:
        return value
    message = "Input should be a valid integer, unable to parse string as an integer"
    raise Refusal.wrong(f"body.{field}", value, type="int_parsing", message=message)


def _bad(message: str, *, param: str | None = None) -> Refusal:
    return Refusal(400, message, type="BadRequestError", param=param)
