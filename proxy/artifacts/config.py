"""The config of an adapter, and the one list of reasons for which vLLM cannot serve it as an adapter.

The list follows vLLM 0.32 (`PEFTHelper.validate_legal`) and, where vLLM loads what it then serves wrongly, TRL's
`validate_lora_for_vllm_sync`. The tensors are judged in `weights`, both together in `check`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from proxy.artifacts.digest import CONFIG_FILE, load_config, read_file
from proxy.artifacts.verdict import Fault
from proxy.errors import ArtifactError

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank (0.32, `vllm.config.lora.MaxLoRARanks`)."""

LARGEST_RANK = MAX_LORA_RANKS[-1]

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

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEATS, _MOST_REPEATS = re.compile(r"[*+{]"), 2
_CHOICES, _MOST_CHOICES = re.compile(r"(?<!\()\?|\|"), 8

_PEFT_PREFIX = "base_model.model."


def _names(value: Any) -> Any:
    """Read peft's `None`, `"all-linear"` and `[...]` alike."""
    return [value] if isinstance(value, str) else value or ()


def _is_cheap(pattern: str) -> bool:
    """Whether matching takes at most about the third power of a name's length: Python's engine tries every way."""
    return len(_REPEATS.findall(pattern)) <= _MOST_REPEATS and len(_CHOICES.findall(pattern)) <= _MOST_CHOICES


def _patterns(value: dict[str, int]) -> dict[str, int]:
    for pattern in value:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern!r:.200} is not a regular expression: {error}") from error
        if _REPEATED_GROUP.search(pattern) or not _is_cheap(pattern):
            raise ValueError(
                f"{pattern!r:.200} can take for ever to match: repeat no group, and other things twice at most"
            )
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

    @property
    def special_targets(self) -> list[str]:
        """The head and the embeddings, as far as `target_modules` names them one by one."""
        return sorted(HEAD_AND_EMBEDDINGS.intersection(name.rpartition(".")[2] for name in self.target_modules))

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
    path = directory / CONFIG_FILE
    return parse_config(load_config(read_file(path), source=str(path)), source=str(path))


def parse_config(raw: Mapping[str, Any], *, source: str) -> AdapterConfig:
    """Read a peft config given as a mapping; `source` names it in the ArtifactError for a field of a wrong type."""
    unsupported = tuple(name for name in UNSUPPORTED_FIELDS if raw.get(name))
    try:
        return _PARSER.validate_python({**raw, "unsupported": unsupported})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{source}: {where} cannot be used: {first['msg']}") from error


def unservable(config: AdapterConfig, *, max_lora_rank: int | None) -> list[Fault]:
    """Return every reason in the config why vLLM cannot serve the adapter; an empty list means that it can.

    `max_lora_rank` is the smallest --max-lora-rank of the fleet, None if it is not known.
    """
    if config.peft_type and config.peft_type != "LORA":
        return [Fault(CONFIG_FILE, f"peft_type is {config.peft_type}, and vLLM serves LORA only", merging_helps=True)]
    broken = [
        (not config.peft_type, "peft_type is missing"),
        (config.rank is None, "r is missing"),
        (config.alpha is None, "lora_alpha is missing"),
        (not config.target_modules, "target_modules is missing"),
    ]
    named = config.special_targets
    without_a_place = [
        (config.dora, "use_dora is set, and vLLM has no place for DoRA's magnitudes"),
        (config.modules_to_save, f"modules_to_save holds whole modules ({', '.join(config.modules_to_save)})"),
        (config.bias != "none", f"bias is {config.bias!r}, and vLLM serves no trained biases"),
        (named, f"target_modules names {' and '.join(named)}, which vLLM does not serve faithfully"),
        (config.unsupported, f"{', '.join(config.unsupported)} is set, which vLLM does not support"),
        (not _is_plain(config.init), f"init_lora_weights is {config.init!r}, which also changes the base model"),
        _rank_reason(config.max_rank, max_lora_rank),
    ]
    return [
        Fault(CONFIG_FILE, text, merging_helps=helps)
        for helps, reasons in ((False, broken), (True, without_a_place))
        for applies, text in reasons
        if applies
    ]


def _rank_reason(rank: int, max_lora_rank: int | None) -> tuple[bool, str]:
    if rank > LARGEST_RANK:
        return True, f"rank {rank} is above {LARGEST_RANK}, the largest that vLLM takes"
    limit = LARGEST_RANK if max_lora_rank is None else max_lora_rank
    return rank > limit, f"rank {rank} is above {limit}, the largest that the fleet takes (--max-lora-rank)"


def _is_plain(init: bool | str) -> bool:
    return isinstance(init, bool) or init.lower() in PLAIN_INITS
