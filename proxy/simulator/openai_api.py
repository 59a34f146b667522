"""POST /v1/completions, /v1/chat/completions, /tokenize, /detokenize and GET /v1/models."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

from proxy.simulator.answer_parts import Envelope
from proxy.simulator.asgi import Answer, Refusal, Request, as_json, event
from proxy.simulator.chat_answer import ChatAnswer
from proxy.simulator.completion_answer import CompletionAnswer
from proxy.simulator.generation_request import GenerationRequest, chat_prompt, read_chat, read_completion
from proxy.simulator.lora import LoraRequest
from proxy.simulator.replica import Replica
from proxy.simulator.sequence import Generation, Sequence
from proxy.simulator.tokens import detokenize, token_text, tokenize

_BUSY = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def completions(replica: Replica, request: Request) -> Answer | None:
    """Answer a completion."""
    body = request.json_object()
    lora = replica.adapter_of(body.get("model"))
    asked = read_completion(body, replica.settings)
    return await _generate(replica, request, CompletionAnswer(_envelope(replica, request, asked, "cmpl"), asked), lora)


async def chat(replica: Replica, request: Request) -> Answer | None:
    """Answer a chat."""
    body = request.json_object()
    lora = replica.adapter_of(body.get("model"))
    asked = read_chat(body, replica.settings)
    return await _generate(replica, request, ChatAnswer(_envelope(replica, request, asked, "chatcmpl"), asked), lora)


async def models(replica: Replica, request: Request) -> Answer:
    """List the base model, then every adapter."""
    settings = replica.settings
    base = _card(replica, settings.model, root=settings.model, parent=None, max_model_len=settings.max_model_len)
    adapters = [
        _card(replica, lora.name, root=lora.path, parent=settings.model, max_model_len=None)
        for lora in replica.registry.all()
    ]
    return as_json({"object": "list", "data": [base, *adapters]})


async def tokenize_text(replica: Replica, request: Request) -> Answer:
    """Return the tokens of a text or of a chat."""
    body = request.json_object()
    replica.adapter_of(body.get("model"))
    tokens = chat_prompt(body["messages"]) if "messages" in body else tokenize(str(body.get("prompt", "")))
    strings = [token_text(token) for token in tokens] if body.get("return_token_strs") else None
    limit = replica.settings.max_model_len
    return as_json({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})


async def detokenize_tokens(replica: Replica, request: Request) -> Answer:
    """Return the text of some tokens."""
    body = request.json_object()
    replica.adapter_of(body.get("model"))
    if "tokens" not in body:
        raise Refusal.missing("tokens", body=body)
    return as_json({"prompt": detokenize(body["tokens"])})


async def _generate(
    replica: Replica, request: Request, answer: CompletionAnswer | ChatAnswer, lora: LoraRequest | None
) -> Answer | None:
    asked = answer.asked
    if (status := replica.faults.now.generations_status) == 400:
        return _not_finite()
    if status:
        return Refusal(status, _BUSY, type="Service Unavailable").answer()
    replica.calls.note_rollout(request, model=asked.model, prompt_tokens=sum(map(len, asked.prompts)), seed=asked.seed)
    generation = _generation(replica, answer, lora)
    replica.engine.submit(generation)
    async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(_drop_on_disconnect(replica, request, generation))
        try:
            if asked.stream:
                await _stream(request, answer, generation)
                return None
            return await _whole(replica, answer, generation, lora)
        finally:
            watcher.cancel()


def _generation(replica: Replica, answer: CompletionAnswer | ChatAnswer, lora: LoraRequest | None) -> Generation:
    asked = answer.asked
    generation = Generation(id=answer.envelope.id, streaming=asked.stream, wants_logprobs=asked.logprobs is not None)
    for prompt in asked.prompts:
        for choice in range(asked.n):
            generation.add(
                Sequence(
                    generation=generation,
                    prompt=prompt,
                    lora=lora,
                    seed=(asked.seed or 0) + choice,
                    max_tokens=asked.tokens_left(prompt, replica.settings),
                    salt=asked.salt,
                    vocab_size=replica.settings.vocab_size,
                )
            )
    return generation


async def _drop_on_disconnect(replica: Replica, request: Request, generation: Generation) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    replica.engine.drop(generation)


def _not_finite() -> Answer:
    return Refusal(400, "Out of range float values are not JSON compliant", type="BadRequestError").answer()


async def _whole(
    replica: Replica, answer: CompletionAnswer | ChatAnswer, generation: Generation, lora: LoraRequest | None
) -> Answer:
    while not generation.done:
        await generation.changed()
    if generation.failed:
        return Refusal.engine_dead().answer()
    tells_logprobs = answer.asked.logprobs is not None or answer.asked.prompt_logprobs is not None
    files = replica.engine.batch.memory.get(lora) if lora else None
    if tells_logprobs and files and not files.finite:
        return _not_finite()
    return as_json(answer.whole(generation.sequences))


async def _stream(request: Request, answer: CompletionAnswer | ChatAnswer, generation: Generation) -> None:
    await request.send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    sent = [0] * len(generation.sequences)
    ended: set[int] = set()
    opening = [event(piece) for piece in answer.opening(generation.sequences)]
    while True:
        pieces = _new_pieces(answer, generation, sent, ended)
        if pieces:
            await _send_piece(request, b"".join(opening + pieces))
            opening = []
        if generation.done:
            break
        await generation.changed()
    if generation.failed:
        # Python's own spacing: vLLM writes this one event with another encoder.
        await _send_piece(request, b"data: " + json.dumps(Refusal.engine_dead().body()).encode() + b"\n\n")
    elif answer.asked.include_usage:
        await _send_piece(request, event(answer.usage_piece(generation.sequences)))
    await request.send({"type": "http.response.body", "body": _DONE, "more_body": False})


def _new_pieces(
    answer: CompletionAnswer | ChatAnswer, generation: Generation, sent: list[int], ended: set[int]
) -> list[bytes]:
    pieces = []
    for index, sequence in enumerate(generation.sequences):
        sequence.settle()
        fresh = len(sequence.tokens) > sent[index]
        # A sequence that was aborted before its first token leaves nothing in the stream.
        ends = sequence.finish_reason is not None and index not in ended and (fresh or sent[index])
        if fresh or ends:
            pieces.append(event(answer.piece(index, sequence, sent[index])))
            sent[index] = len(sequence.tokens)
        if ends:
            ended.add(index)
    return pieces


async def _send_piece(request: Request, body: bytes) -> None:
    await request.send({"type": "http.response.body", "body": body, "more_body": True})


def _envelope(replica: Replica, request: Request, asked: GenerationRequest, prefix: str) -> Envelope:
    return Envelope(
        id=f"{prefix}-{request.headers.get('x-request-id') or uuid.uuid4().hex[:16]}",
        created=int(time.time()),
        model=asked.model or replica.settings.model,
        fingerprint=replica.fingerprint,
        details=replica.settings.prompt_tokens_details,
        block_size=replica.settings.block_size,
    )


def _card(replica: Replica, name: str, *, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": int(time.time()),
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
