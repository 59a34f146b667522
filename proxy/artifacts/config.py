"""The config of an adapter, and the one list of reasons for which vLLM cannot serve it as an adapter.

The list follows vLLM 0.32 (`PEFTHelper.validate_legal`) and, where vLLM loads what it then serves wrongly, TRL's
`validate_lora_for_vllm_sync`. The tensors are judged in `weights`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from proxy.artifacts.digest import CONFIG_FILE, canonical_config
from proxy.errors import ArtifactError

PLAIN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica", "lora_ga"})
"""Named initialisations that only choose the first weights. Others (PiSSA, OLoRA ...) also change the base model."""

UNSUPPORTED_FIELDS = (
    "lora_bias",
    "alora_invocation_tokens",
    "layer_replication",
    "use_bdlora",
    "use_qalora",
    "target_parameters",
)
"""Further peft features without a place in vLLM's adapters: set to anything but nothing, they are a reason."""

HEAD_AND_EMBEDDINGS = frozenset({"lm_head", "embed_tokens"})
"""vLLM refuses these on most models, and leaves the head's change out of prompt_logprobs on the others."""

_PEFT_PREFIX = "base_model.model."


def _names(value: Any) -> Any:
    """Read peft's `None`, `"all-linear"` and `[...]` alike."""
    return [value] if isinstance(value, str) else value or ()


def _patterns(value: dict[str, int]) -> dict[str, int]:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Rank = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says, as far as serving depends on it."""

    rank: Annotated[int | None, Field(alias="r", ge=1)] = None
    """Rank of every module that `rank_pattern` does not name. None if the file has no `r`."""
    rank_pattern: Annotated[
        Mapping[str, Rank], BeforeValidator(lambda value: value or {}), AfterValidator(_patterns)
    ] = field(default_factory=dict)
    """Other ranks, by a regular expression that the end of the module's name matches."""
    alpha: Annotated[float | None, Field(alias="lora_alpha")] = None
    """Scale: vLLM multiplies B·A by alpha / rank (by alpha / sqrt(rank) under rsLoRA). None if the file has none."""
    target_modules: Names = ()
    """Names of the adapted modules, or one regular expression, or `all-linear`."""
    peft_type: Annotated[str, BeforeValidator(lambda value: str(value or "").upper())] = ""
    base_model: Annotated[str, Field(alias="base_model_name_or_path"), BeforeValidator(lambda value: value or "")] = ""
    """Name or path of the model that was trained; empty if the file does not say."""
    bias: Annotated[str, BeforeValidator(lambda value: value or "none")] = "none"
    dora: Annotated[bool, Field(alias="use_dora"), BeforeValidator(bool)] = False
    modules_to_save: Names = ()
    init: Annotated[bool | str, Field(alias="init_lora_weights"), BeforeValidator(lambda v: v or False)] = True
    """How the weights were initialised: a flag, or a name such as `pissa`."""
    unsupported: tuple[str, ...] = ()
    """Those of UNSUPPORTED_FIELDS that are set."""

    @property
    def max_rank(self) -> int:
        """The largest rank of any module: what vLLM's --max-lora-rank must reach. 0 if the file names none."""
        return max([self.rank or 0, *self.rank_pattern.values()])

    def rank_of(self, module: str) -> int | None:
        """Return the rank of one module, by peft's rule: the first pattern that matches the end of the name wins."""
        name = module.removeprefix(_PEFT_PREFIX)
        for pattern, rank in self.rank_pattern.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", name):
                return rank
        return self.rank


_PARSER = TypeAdapter(AdapterConfig)


def read_config(directory: Path) -> AdapterConfig:
    """Read adapter_config.json in `directory`. Raises ArtifactError when it is missing, broken or has a wrong type."""
    return parse_config(json.loads(canonical_config(directory)), source=str(directory / CONFIG_FILE))


def parse_config(raw: Mapping[str, Any], *, source: str) -> AdapterConfig:
    """Read a peft config given as a mapping; `source` names it in the ArtifactError for a field of a wrong type."""
    unsupported = tuple(name for name in UNSUPPORTED_FIELDS if raw.get(name))
    try:
        return _PARSER.validate_python({**raw, "unsupported": unsupported})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{source}: {where} cannot be used: {first['msg']}") from error


def unservable(config: AdapterConfig, *, max_lora_rank: int | None) -> list[str]:
    """Return every reason why vLLM cannot serve the adapter; an empty list means that it can.

    `max_lora_rank` is the smallest --max-lora-rank of the fleet; None leaves the rank to the replicas.
    """
    if config.peft_type != "LORA":
        return [f"peft_type is {config.peft_type or 'missing'}, and vLLM serves LORA only"]
    named = sorted(HEAD_AND_EMBEDDINGS.intersection(name.rpartition(".")[2] for name in config.target_modules))
    reasons = [
        (config.rank is None, "r is missing"),
        (config.alpha is None, "lora_alpha is missing"),
        (not config.target_modules, "target_modules is missing"),
        (config.dora, "use_dora is set, and vLLM has no place for DoRA's magnitudes"),
        (config.modules_to_save, f"modules_to_save holds whole modules ({', '.join(config.modules_to_save)})"),
        (config.bias != "none", f"bias is {config.bias!r}, and vLLM serves no trained biases"),
        (named, f"target_modules names {' and '.join(named)}, which vLLM does not serve faithfully"),
        (config.unsupported, f"{', '.join(config.unsupported)} is set, which vLLM does not support"),
        (not _is_plain(config.init), f"init_lora_weights is {config.init!r}, which also changes the base model"),
        (
            max_lora_rank is not None and config.max_rank > max_lora_rank,
            f"rank {config.max_rank} is above {max_lora_rank}, the largest that the fleet takes (--max-lora-rank)",
        ),
    ]
    return [reason for applies, reason in reasons if applies]


def _is_plain(init: bool | str) -> bool:
    return isinstance(init, bool) or init.lower() in PLAIN_INITS
