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

    def behind(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Return how far each token of an answer is behind the best one at its place, in logits."""
        torch = _imported("torch")
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0].float()
        places = logits[len(prompt) - 1 : -1]
        tokens = torch.tensor(list(answer))
        behind: list[float] = (places.max(-1).values - places.gather(1, tokens[:, None])[:, 0]).tolist()
        return behind

    def would_say(self, prompt: Sequence[int], answer: Sequence[int]) -> bool:
        """Tell whether this is a greedy answer of the weights as they are, as far as bfloat16 can tell."""
        return max(self.behind(prompt, answer)) < TIE


def _imported(module: str) -> Any:
    return importlib.import_module(module)
