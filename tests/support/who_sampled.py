"""Which weights sampled a token? Compare the log-probabilities that a replica reported with transformers + peft.

Computing needs torch, which is imported only then: tests are collected without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.recorder import Exchange, Recorder
from tests.support.tiny_model import MODEL

SAME_WEIGHTS_NATS = 0.12
"""Largest difference of one token's log-probability between bfloat16 on the replica and float32 here: 0.06 was seen,
while a rollout's mean difference to any other policy was 0.13 or more."""

_BATCH = 128


@dataclass(frozen=True)
class Sampled:
    """One answered rollout."""

    policy: str
    """What the rollout asked for."""
    replica: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """What the replica reported for each token."""


def assert_own_weights(record: Recorder) -> None:
    """Fail unless every token of every recorded rollout was sampled by the policy that it named.

    The adapters are those that the recorder kept when they were announced.
    """
    rollouts = [_sampled(exchange) for exchange in record.of("/v1/completions") if exchange.status == 200]
    adapters = {path.name: path for path in sorted(record.kept.iterdir())}
    found = distances(rollouts, model=MODEL, adapters=adapters)
    for position, rollout in enumerate(rollouts):
        worst = float(found[rollout.policy][position].max())
        assert worst < SAME_WEIGHTS_NATS, f"{rollout.policy} on replica {rollout.replica}: off by {worst:.3f} nats"
    # The bound alone would pass if all policies were alike: over all rollouts of one, every other is far off.
    for asked in {(rollout.policy, rollout.replica) for rollout in rollouts}:
        positions = [n for n, rollout in enumerate(rollouts) if (rollout.policy, rollout.replica) == asked]
        means = {name: statistics.mean(float(found[name][n].mean()) for n in positions) for name in adapters}
        own = means.pop(asked[0])
        assert own < min(means.values()) / 3, (asked, own, means)


def _sampled(exchange: Exchange) -> Sampled:
    asked, choice = exchange.json(), exchange.answered()["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    return Sampled(
        policy=asked["model"],
        replica=exchange.headers["x-proxy-upstream"],
        prompt=asked["prompt"],
        tokens=choice["token_ids"],
        logprobs=choice["logprobs"]["token_logprobs"],
    )


def distances(rollouts: Sequence[Sampled], *, model: Path, adapters: dict[str, Path]) -> dict[str, list[Any]]:
    """Return for each adapter and rollout |reported - computed| of every token, in nats, as one tensor a rollout.

    The computation is float32 and the replica's bfloat16: the same weights agree within a few hundredths.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names = list(adapters)
    peft = PeftModel.from_pretrained(base, str(adapters[names[0]]), adapter_name=names[0])
    for name in names[1:]:
        peft.load_adapter(str(adapters[name]), adapter_name=name)
    peft.eval()
    found: dict[str, list[Any]] = {}
    for name in names:
        peft.set_adapter(name)
        found[name] = [
            distance
            for start in range(0, len(rollouts), _BATCH)
            for distance in _batch_distances(peft, rollouts[start : start + _BATCH])
        ]
    return found


def _batch_distances(model: Any, rollouts: Sequence[Sampled]) -> list[Any]:
    import torch

    longest = max(len(rollout.prompt) + len(rollout.tokens) for rollout in rollouts)
    ids = torch.zeros(len(rollouts), longest, dtype=torch.long)
    for row, rollout in enumerate(rollouts):
        whole = rollout.prompt + rollout.tokens
        ids[row, : len(whole)] = torch.tensor(whole)
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits.log_softmax(-1)
    distances = []
    for row, rollout in enumerate(rollouts):
        start = len(rollout.prompt) - 1
        tokens = torch.tensor(rollout.tokens)
        computed = logprobs[row, start : start + len(tokens)].gather(1, tokens[:, None])[:, 0]
        distances.append((computed - torch.tensor(rollout.logprobs)).abs())
    return distances
