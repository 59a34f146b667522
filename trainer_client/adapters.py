"""What can be published, and how its bytes are gathered: from then on the training may change the weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import save

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, read_file
from proxy.artifacts.manifest import ADAPTER_FILES
from proxy.errors import ArtifactError
from trainer_client.collective import is_sharded, whole
from trainer_client.errors import UnservableError

_AS_PEFT_WRITES_IT = {"format": "pt"}
"""Metadata of the safetensors file: the same bytes, the same digest."""


_LORA = re.compile(r"\.lora_|\.modules_to_save\.|\.bias$")
"""Parameters that the adapter or its config tell of."""

MAX_NAMES_SHOWN = 3

log = logging.getLogger(__name__)


class Peft(Protocol):
    """A peft PeftModel, as far as it is needed here."""

    peft_config: Mapping[str, Any]
    active_adapters: list[str]

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Return every parameter, frozen ones as well."""


Adapter = str | Path | Peft | tuple[Mapping[str, Any], Mapping[str, Any]]
"""What can be published: a directory in peft's format, a PeftModel, or (tensors by peft's names, config).

Tensors are numpy's or torch's, DTensors among them.
"""


@dataclass(frozen=True)
class Payload:
    """An adapter's bytes, apart from the training."""

    source: str
    """What was given, for messages."""
    config: bytes
    """Content of adapter_config.json."""
    weights: bytes
    """Content of adapter_model.safetensors."""

    def files(self) -> dict[str, bytes]:
        """Return the two files by name."""
        return {CONFIG_FILE: self.config, WEIGHTS_FILE: self.weights}


@dataclass(frozen=True)
class StateDict:
    """Tensors that are not gathered yet, by peft's names, and the fields of their LoraConfig."""

    source: str
    tensors: Mapping[str, Any]
    config: Mapping[str, Any]
    model: Peft | None = None
    """The model that they are of, if it was given: it can be merged as it is."""

    @property
    def sharded(self) -> bool:
        """Whether every rank has to help to gather it."""
        return is_sharded(self.tensors.values())

    @property
    def model_sharded(self) -> bool:
        """Whether every rank has to help to gather the whole model."""
        return self.model is not None and is_sharded(value for _, value in self.model.named_parameters())


@dataclass(frozen=True)
class Directory:
    """An adapter that peft has saved."""

    path: Path

    @property
    def source(self) -> str:
        """What was given, for messages."""
        return f"adapter {self.path}"


def opened(adapter: Adapter) -> Directory | StateDict:
    """Return what is to be gathered: a directory, or tensors. Raises UnservableError for what is neither."""
    if isinstance(adapter, str | Path):
        return Directory(Path(adapter))
    if isinstance(adapter, tuple):
        return StateDict("the given state dict", *adapter)
    if hasattr(adapter, "peft_config") and hasattr(adapter, "active_adapters"):
        return _of_model(adapter)
    kind = type(adapter).__name__
    raise UnservableError(f"a {kind} cannot be published; give a PeftModel, a directory or (state dict, config)")


def peft_adapter(model: Peft, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return an adapter of a PeftModel as (tensors, config), its tensors not copied.

    Says so if other parameters of the model train beside it.
    """
    from peft import get_peft_model_state_dict

    if beside := [name for name, value in model.named_parameters() if value.requires_grad and not _LORA.search(name)]:
        log.warning(
            "%d parameters train beside the adapter: unless it is merged, replicas keep the base model's: %s",
            len(beside),
            ", ".join(beside[:MAX_NAMES_SHOWN]),
        )
    config = copy(model.peft_config[name])
    config.inference_mode = True  # as peft's own save_pretrained writes it
    # Whether embeddings were resized is not looked for: peft would ask the Hub at every publication.
    return get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False), config.to_dict()


def gather(adapter: StateDict, *, keep: bool) -> dict[str, Any]:
    """Return every tensor whole and on the CPU; nothing if not `keep`, for a rank that only helps.

    A collective if `adapter.sharded`. Raises UnservableError for tensors of an unknown library.
    """
    whole_ones = ((name, _whole(name, tensor)) for name, tensor in adapter.tensors.items())
    return {name: tensor for name, tensor in whole_ones if keep}


def packed(adapter: Directory | StateDict, tensors: Mapping[str, Any]) -> Payload:
    """Copy an adapter's bytes into memory; `tensors` are those of a StateDict, gathered.

    Raises UnservableError for a directory without an adapter.
    """
    if isinstance(adapter, Directory):
        return _read(adapter)
    return Payload(adapter.source, _config_bytes(adapter.config), _serialise(dict(tensors)))


def _read(adapter: Directory) -> Payload:
    directory = adapter.path
    for name in ADAPTER_FILES:
        if not (directory / name).exists():
            raise UnservableError(f"{directory / name} is missing; give the directory that peft saved the adapter to")
    try:
        config, weights = (read_file(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
    except ArtifactError as error:
        raise UnservableError(str(error)) from error
    return Payload(adapter.source, config, weights)


def _of_model(model: Peft) -> StateDict:
    active = list(model.active_adapters)
    if len(active) != 1:
        raise UnservableError(f"{len(active)} adapters are active ({', '.join(active)}), and a policy is one of them")
    return StateDict(f"the adapter of {type(model).__name__}", *peft_adapter(model, active[0]), model=model)


def _whole(name: str, tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor)
    if type(tensor).__module__.partition(".")[0] == "torch":
        return whole(tensor).contiguous()
    raise UnservableError(f"{name} is a {type(tensor).__name__}; give arrays of numpy or tensors of torch")


def _serialise(tensors: dict[str, Any]) -> bytes:
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        return save(tensors, _AS_PEFT_WRITES_IT)
    from safetensors.torch import save as save_of_torch

    return save_of_torch(tensors, _AS_PEFT_WRITES_IT)


def _config_bytes(config: Mapping[str, Any]) -> bytes:
    # peft's configs hold sets, whose order changes from process to process: sorted, the bytes stay the same
    return json.dumps(dict(config), indent=2, sort_keys=True, default=sorted).encode()
