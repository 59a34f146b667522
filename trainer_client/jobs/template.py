"""The file that `lora-sync jobs init` writes: every field with its documentation and a value to start from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer_client.jobs.config import FleetConfig

_WIDTH = 100


def template() -> str:
    """Return a config as YAML text, with comments. It can be read as it is."""
    head = (
        "# A fleet on Hugging Face Jobs: lora-sync jobs up THIS_FILE\n# Fields marked (required) are yours to fill in."
    )
    return "\n".join([head, *_lines(FleetConfig, indent="")]) + "\n"


def _lines(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield ""
        required = field.is_required() and not _part(field)
        yield from _comment(f"{'(required) ' * required}{field.description}", indent)
        if part := _part(field):
            yield f"{indent}{name}:"
            yield from _lines(part, indent + "  ")
        else:
            yield f"{indent}{name}: {_yaml(field.examples[0] if field.examples else field.default)}"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _part(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return str(yaml.safe_dump(plain, default_flow_style=True, width=_WIDTH)).removesuffix("\n").removesuffix("\n...")
