"""Write LoRA adapters in peft's format with numpy alone, for the demo and for tests.

The tensors have the names and shapes that peft gives a Qwen2 model, so real vLLM serves them as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE

Tensors = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Geometry:
    """The layer sizes of a Qwen2-like base model. The defaults are those of the tests' tiny model."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of every linear projection of one layer."""
        kv = self.hidden // self.heads * self.kv_heads
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.hidden, kv),
            "self_attn.v_proj": (self.hidden, kv),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }


def lora_tensors(*, rank: int, seed: int, geometry: Geometry | None = None) -> Tensors:
    """Return random lora_A (rank, inputs) and lora_B (outputs, rank) matrices; another seed gives other weights.

    lora_B is far from zero, so that on the tests' tiny model two adapters differ in their most likely token.
    """
    geometry = geometry or Geometry()
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(geometry.layers):
        for name, (inputs, outputs) in geometry.projections().items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            bound = inputs**-0.5
            tensors[f"{prefix}.lora_A.weight"] = random.uniform(-bound, bound, (rank, inputs)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = random.normal(0, 0.5, (outputs, rank)).astype(np.float32)
    return tensors


def lora_config(*, rank: int, base_model: str = "sim") -> dict[str, object]:
    """Return the adapter_config.json that peft writes for a plain LoRA on all linear layers."""
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {},
        "target_modules": sorted(name.rpartition(".")[2] for name in Geometry().projections()),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def write_adapter(
    directory: Path, *, seed: int, rank: int = 8, base_model: str = "sim", geometry: Geometry | None = None
) -> Path:
    """Write a LoRA adapter with random weights into `directory` (made if missing) and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = lora_config(rank=rank, base_model=base_model)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    save_file(lora_tensors(rank=rank, seed=seed, geometry=geometry), directory / WEIGHTS_FILE, {"format": "pt"})
    return directory
