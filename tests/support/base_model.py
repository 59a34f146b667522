"""The tiny model in transformers: change its weights, save it whole, and tell whether a replica has answered with it.

Needs torch, which is imported only when a model is made: tests are collected without it.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.tiny_model import tiny_model

TIE = 0.25
"""Logits so near to the best one may win: vLLM and transformers add in another order, in bfloat16."""

_BATCH = 32


class BaseModel:
    """Base weights: those of the tiny model at first."""

    def __init__(self) -> None:
        torch, transformers = _imported("torch"), _imported("transformers")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.bfloat16)

    def change(self, seed: int) -> None:
        """Take a step, of a kind."""
        torch = _imported("torch")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.model.parameters():
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std() * 0.3
                weight.add_(noise.to(weight.dtype))

    def copy(self) -> Self:
        """Return a model that keeps these weights."""
        return copy.deepcopy(self)

    def save(self, directory: Path, *, shard_size: str = "5GB") -> Path:
        """Write a checkpoint as trainers do, in files of this size at most; return its directory."""
        self.model.save_pretrained(directory, max_shard_size=shard_size)
        return directory

    def behind(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return how far each token of each answer is behind the best one at its place, in logits.

        All prompts are of one length, and so are all answers.
        """
        torch = _imported("torch")
        ids = torch.tensor([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
        with torch.no_grad():
            logits = torch.cat([self.model(batch).logits.float() for batch in ids.split(_BATCH)])
        places, tokens = logits[:, len(prompts[0]) - 1 : -1], ids[:, len(prompts[0]) :]
        behind: list[list[float]] = (places.max(-1).values - places.gather(2, tokens[..., None])[..., 0]).tolist()
        return behind

    def would_say(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Tell whether this is a greedy answer of the weights as they are, as far as bfloat16 can tell."""
        return max(self.behind([prompt], [answer])[0]) < TIE


def _imported(module: str) -> Any:
    return importlib.import_module(module)
