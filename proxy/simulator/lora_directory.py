"""Read a LoRA directory as a vLLM worker does: the same checks in the same order, refused with the same words.

Layer numbers and sizes are not compared with a model, since there is none: as in vLLM, layers that do not exist and
tensors that are too small are accepted.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from proxy.errors import ArtifactError

TARGETS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
"""The linear layers of a Qwen2-like model, which adapters may change."""

_CLASSIFIER_HEADS = ("classifier", "score")
_UNSUPPORTED_FLAGS = {
    "use_dora": "vLLM does not yet support DoRA.",
    "lora_bias": "vLLM does not support LoRA bias (lora_bias).",
}
_EXPONENT_BITS = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}
_WORDS = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}
_HEADER_LENGTH_BYTES = 8


class AdapterNotFoundError(Exception):
    """There is no adapter in the directory, or not yet."""


class AdapterRefusedError(Exception):
    """The directory holds something that cannot be served. The message is the worker's."""


@dataclass(frozen=True)
class AdapterFiles:
    """What was read."""

    digest: str
    """As `proxy.artifacts.digest.adapter_digest` computes it."""
    finite: bool
    """False when some weight is NaN or infinite: such an adapter loads, and then spoils what it answers."""


def resolve(lora_path: str) -> Path:
    """Return where the path points. A relative path that is not there would be a Hub repository, offline."""
    return Path(lora_path).expanduser()


def read_adapter(directory: Path, *, max_rank: int) -> AdapterFiles:
    """Read and check the adapter. Raises AdapterNotFoundError or AdapterRefusedError."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_bytes())
        if not isinstance(config, dict):
            raise AdapterRefusedError("list indices must be integers or slices, not str")
        _check_config(config, max_rank=max_rank)
        weights = directory / WEIGHTS_FILE
        if not weights.is_file():
            raise AdapterRefusedError(f"{directory} doesn't contain tensors")
        _check_tensors(weights, rank=config["r"], patterned=bool(config.get("rank_pattern")), directory=directory)
        return AdapterFiles(digest=adapter_digest(directory), finite=_all_finite(weights))
    except (FileNotFoundError, ArtifactError) as error:
        raise AdapterNotFoundError(str(directory)) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterRefusedError(str(error)) from error


def _check_config(config: dict[str, Any], *, max_rank: int) -> None:
    if missing := {"r", "lora_alpha", "target_modules"} - set(config):
        raise AdapterRefusedError(f"Missing required configuration fields: {missing}")
    problems = []
    if foreign := [name for name in config.get("modules_to_save") or () if name not in _CLASSIFIER_HEADS]:
        problems.append(
            'vLLM only supports modules_to_save being either None or ["classifier", "score"] for classification '
            f"models. Unsupported modules_to_save: {foreign}"
        )
    problems += [text for flag, text in _UNSUPPORTED_FLAGS.items() if config.get(flag)]
    rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 0)
    if rank > max_rank:
        problems.append(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
    if config.get("bias", "none") != "none":
        problems.append("Adapter bias is not supported.")
    if problems:
        raise AdapterRefusedError(" ".join(problems))


def _check_tensors(weights: Path, *, rank: int, patterned: bool, directory: Path) -> None:
    with safe_open(weights, framework="numpy") as file:
        names = list(file.keys())
        modules = [_module_of(name) for name in names]
        if foreign := [module for module in modules if module.rpartition(".")[2] not in TARGETS]:
            raise AdapterRefusedError(
                f"While loading {directory}, expected target modules in {set(TARGETS)} but received {foreign}. "
                "Please verify that the loaded LoRA module is correct"
            )
        halves: dict[str, set[str]] = {}
        for name, module in zip(names, modules, strict=True):
            halves.setdefault(module, set()).add("A" if "lora_A" in name else "B")
            rows = file.get_slice(name).get_shape()[0]
            if "lora_A" in name and rows > rank and not patterned:
                raise AdapterRefusedError(
                    f"The size of tensor a ({rank}) must match the size of tensor b ({rows}) "
                    "at non-singleton dimension 0"
                )
    if any("A" not in half for half in halves.values()):
        raise AdapterRefusedError("")  # an assertion without words
    if any("B" not in half for half in halves.values()):
        raise AdapterRefusedError("unsupported operand type(s) for *=: 'NoneType' and 'float'")


def _module_of(name: str) -> str:
    return re.sub(r"\.lora_[AB](\.default)?\.weight$", "", name.removeprefix("base_model.model."))


def _all_finite(weights: Path) -> bool:
    raw = weights.read_bytes()
    length = int.from_bytes(raw[:_HEADER_LENGTH_BYTES], "little")
    start = _HEADER_LENGTH_BYTES + length
    header: dict[str, Any] = json.loads(raw[_HEADER_LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    return all(_is_finite(raw[start:], tensor) for tensor in header.values())


def _is_finite(data: bytes, tensor: dict[str, Any]) -> bool:
    exponent = _EXPONENT_BITS.get(tensor["dtype"])
    if exponent is None:
        return True
    # Every exponent bit set means NaN or infinity, in all three formats; numpy itself knows no bfloat16.
    begin, end = tensor["data_offsets"]
    words = np.frombuffer(data[begin:end], dtype=_WORDS[tensor["dtype"]])
    return not bool(np.any((words & exponent) == exponent))
