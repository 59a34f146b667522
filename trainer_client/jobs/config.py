"""What a fleet of Jobs is, field by field: the string under a field documents it, also in `lora-sync jobs init`.

Reading a file reports every mistake at once, each with its line and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from proxy.errors import SettingsError
from trainer_client.slots import max_lora_rank, vllm_args

OUR_LABELS = "lora-sync-"
"""How the labels begin by which fleets are found again."""

FOLDER = "folder"
"""In the context of validation: where relative paths begin."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""What huggingface_hub documents for keys and values of labels (`update_job_labels`)."""
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD)$")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def seconds(value: Any) -> Any:
    """Return a time as seconds: a number, or a number with s, m, h or d as huggingface_hub takes it."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)):
        return float(found[1]) * _UNITS[found[2] or "s"]
    if isinstance(value, str):
        raise ValueError("is not a time; give seconds, or a number with a unit, such as 90s, 30m or 6h")
    return value


def _no_token(text: str) -> str:
    if _TOKEN.search(text):
        raise ValueError("holds a token, which would be shown to everyone who sees the Job; use `secrets`")
    return text


def _tagged(image: str) -> str:
    # a Space as an image has no tag
    if "/spaces/" not in image and not re.search(r"(:[\w.-]+|@sha256:[0-9a-f]{64})$", image):
        raise ValueError("has no tag; name the version, such as vllm/vllm-openai:v0.27.0, so that all replicas agree")
    return image


def _absolute(path: str) -> str:
    if not path.startswith("/") or path.rstrip("/") == "":
        raise ValueError("is not an absolute path below /; give one such as /lora")
    return path.rstrip("/")


def _directory(path: Path, info: ValidationInfo) -> Path:
    found = (info.context or {}).get(FOLDER, Path()) / path
    if not found.is_dir():
        raise ValueError(f"is no directory: there is no {found}")
    return Path(found)


def _open_values(environment: dict[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"has {name!r}, which is not a name of an environment variable")
        if _SECRET_NAME.search(name) or _TOKEN.search(value):
            raise ValueError(f"has {name}, which looks like a secret; list the name {name} under `secrets` instead")
    return environment


def _variable_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _VARIABLE.fullmatch(name) or _TOKEN.search(name):
            raise ValueError("has an entry that is not a name of an environment variable; give names, never values")
    return names


def _labels(labels: dict[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if not _LABEL.fullmatch(name) or not _LABEL.fullmatch(value):
            raise ValueError(f"has {name}={value}; both may hold letters, digits, - and _, at most 100 of them")
        if name == "name" or name.startswith(OUR_LABELS):
            raise ValueError(f"has {name}, which lora-sync sets itself")
    return labels


Seconds = Annotated[float, BeforeValidator(seconds), Field(gt=0)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_no_token)]
Image = Annotated[Text, AfterValidator(_tagged)]
Environment = Annotated[dict[str, str], AfterValidator(_open_values)]
SecretNames = Annotated[tuple[str, ...], AfterValidator(_variable_names)]


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
    )


class ReplicasConfig(_Part):
    """The vLLM servers, one Job each."""

    count: int = Field(default=2, ge=1, le=64)
    """How many. `lora-sync jobs scale N` changes it while everything runs."""
    image: Image = "vllm/vllm-openai:v0.27.0"
    """Image with the `vllm` command, with its tag."""
    flavor: Text = "a10g-large"
    """Hardware of each; `hf jobs hardware` lists names and prices."""
    args: tuple[Text, ...] = ()
    """Further arguments of `vllm serve`, such as [--max-model-len, "8192"]. The LoRA flags follow from other fields."""
    environment: Environment = {}
    """Further environment variables. Everyone who sees the Job can read them."""
    secrets: SecretNames = ()
    """Names of environment variables of this machine to pass on as secrets, such as HF_TOKEN for a gated model."""
    timeout: Seconds = Field(default=6 * 3600, examples=["6h"])
    """After this the Hub ends the Job whatever happens. It bounds the bill, should this machine be lost."""
    start_timeout: Seconds = Field(default=30 * 60, examples=["30m"])
    """How long a replica may take until its /health answers: hardware, image, model."""


class TrainerConfig(_Part):
    """The trainer's Job. The proxy runs in it, too, at http://127.0.0.1:PROXY_PORT."""

    image: Image = Field(examples=["ghcr.io/me/trainer:1.0"])
    """Image with the trainer and lora-sync-proxy in it, with its tag."""
    command: tuple[Text, ...] = Field(min_length=1, examples=[["python", "train.py"]])
    """What to run once every replica is up. When it ends, everything ends."""
    code: Annotated[Path, AfterValidator(_directory)] | None = None
    """Directory of this machine to run the command in, such as `.`; relative to this file. `up` copies it into the
    bucket, without what begins with a dot, and the Job sees it, read-only, at /code. Unset: the image has all."""
    setup: Text | None = None
    """Shell command to run first, such as `pip install lora-sync-proxy trl peft`, where the image lacks something."""
    flavor: Text = "a10g-large"
    """Hardware of the trainer."""
    environment: Environment = {}
    """Further environment variables, PROXY_ settings among them. Everyone who sees the Job can read them."""
    secrets: SecretNames = ()
    """Names of environment variables of this machine to pass on as secrets. HF_TOKEN always is."""
    proxy_port: int = Field(default=8000, ge=1, le=65535)
    """Port of the proxy on the trainer's loopback."""
    timeout: Seconds = Field(default=6 * 3600, examples=["6h"])
    """After this the Hub ends the Job."""


class FleetConfig(_Part):
    """A fleet: one bucket, N replicas, one trainer."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,28}[a-z0-9])?$", examples=["math-r1"])
    """Name of the fleet, by which `status`, `scale` and `down` find its Jobs. One fleet of a name is up at a time."""
    namespace: str | None = None
    """Account or organization that the Jobs belong to. Unset: the token's own account."""
    bucket: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", examples=["me/runs"])
    """Storage bucket in which the trainer leaves the policies. Created, private, if it does not exist."""
    mount: Annotated[str, AfterValidator(_absolute)] = "/lora"
    """Where every Job sees the bucket: writable in the trainer, read-only in the replicas."""
    model: Text = Field(examples=["Qwen/Qwen2.5-Math-1.5B"])
    """Base model that the replicas serve."""
    lora_rank: int = Field(default=16, ge=1)
    """Largest rank of the adapters. vLLM's --max-lora-rank follows from it."""
    max_staleness: int = Field(default=4, ge=0)
    """How many versions a rollout may lag behind the newest, as in the trainer. vLLM's --max-loras follows from it."""
    network: Literal["exposed", "group"] = "exposed"
    """How rollouts reach the replicas: `exposed` goes through https://ID--PORT.hf.jobs with the token, about 100 ms a
    round trip; `group` goes directly from Job to Job within a network group."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port on which the replicas listen."""
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = {}
    """Further labels of every Job."""
    poll: Seconds = Field(default=3.0, examples=["3s"])
    """How often `up` looks at the Jobs and at /health."""
    replicas: ReplicasConfig = ReplicasConfig()
    """The vLLM servers, one Job each."""
    trainer: TrainerConfig
    """The trainer's Job. The proxy runs in it, too."""

    @model_validator(mode="after")
    def _servable(self) -> FleetConfig:
        try:
            max_lora_rank(self.lora_rank)
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return self

    def lora_args(self) -> list[str]:
        """Return the arguments of `vllm serve` with which every policy finds a slot."""
        return vllm_args(max_staleness=self.max_staleness, rank=self.lora_rank)


def read(path: Path) -> FleetConfig:
    """Read a fleet's config from YAML.

    Raises SettingsError that lists every mistake as FILE:LINE: FIELD, what is wrong, and what to do.
    """
    try:
        text = path.read_text()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        fields = yaml.safe_load(text)
    except OSError as error:
        hint = "`lora-sync jobs init` writes one"
        raise SettingsError(f"{path} cannot be read ({error.strerror}); {hint}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not a text file: {error.reason}") from error
    except yaml.YAMLError as error:
        line = error.problem_mark.line + 1 if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark else 1
        what = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise SettingsError(f"{path}:{line}: this is not YAML: {what}") from error
    if node is None or not isinstance(fields, dict):
        raise SettingsError(f"{path}:1: there are no fields; `lora-sync jobs init` writes a file to start from")
    if twice := list(_repeated(node)):
        raise SettingsError("\n".join(f"{path}:{line}: {key} is set twice; remove one" for key, line in twice))
    try:
        return FleetConfig.model_validate(fields, context={FOLDER: path.parent})
    except ValidationError as error:
        mistakes = [f"{path}:{_line(node, one['loc'])}: {_sentence(one)}" for one in error.errors(include_url=False)]
        raise SettingsError("\n".join(mistakes)) from error


def _sentence(error: ErrorDetails) -> str:
    where = ".".join(map(str, error["loc"])) or "the config:"
    if error["type"] == "missing":
        return f"{where} is missing; add it (`lora-sync jobs init -` shows every field)"
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(error["loc"][-1]), _fields(error["loc"][:-1]), n=1)
        return f"{where} is not a field; " + (f"did you mean {near[0]}?" if near else "remove it")
    what = error["msg"].removeprefix("Value error, ")
    return f"{where} {what}" if error["type"] == "value_error" else f"{where}: {what[:1].lower()}{what[1:]}"


def _fields(loc: tuple[int | str, ...]) -> list[str]:
    model: Any = FleetConfig
    for part in loc:
        model = model.model_fields[part].annotation
    return list(model.model_fields)


def _line(node: yaml.Node, loc: tuple[int | str, ...], line: int = 1) -> int:
    """Return the line (from 1) of what `loc` names, or of the innermost part around it that is there."""
    if loc and isinstance(node, yaml.SequenceNode) and isinstance(loc[0], int) and loc[0] < len(node.value):
        entry = node.value[loc[0]]
        return _line(entry, loc[1:], entry.start_mark.line + 1)
    for key, value in node.value if loc and isinstance(node, yaml.MappingNode) else ():
        if key.value == loc[0]:
            return _line(value, loc[1:], key.start_mark.line + 1)
    return line


def _repeated(node: yaml.MappingNode) -> Iterator[tuple[str, int]]:
    known = set()
    for key, value in node.value:
        if key.value in known:
            yield key.value, key.start_mark.line + 1
        known.add(key.value)
        if isinstance(value, yaml.MappingNode):
            yield from _repeated(value)
