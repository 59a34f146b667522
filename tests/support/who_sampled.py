"""Which weights sampled a token? Compare the log-probabilities that a replica reported with transformers + peft.

Needs torch: import it only in tests on real vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

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


def distances(rollouts: Sequence[Sampled], *, model: Path, adapters: dict[str, Path]) -> dict[str, list[Any]]:
    """Return for each adapter and rollout |reported - computed| of every token, in nats, as one tensor a rollout.

    The computation is float32 and the replica's bfloat16: the same weights agree within a few hundredths.
    """
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
