"""The model of an adapter of which only the files are there: its base model is loaded whole, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from peft import PeftModel

from trainer_client.errors import UnservableError

NO_BASE = "{source} does not name its base model; give base_model=, its name or directory"


def loaded(files: Mapping[str, bytes], *, base_model: str, source: str, scratch: Path) -> Any:
    """Return the PeftModel of an adapter's files on `base_model`, a directory or a repository of the Hub.

    `source` names the adapter in the UnservableError for a base model that cannot be loaded. In `scratch` its files are
    while peft reads them.
    """
    if not base_model:
        raise UnservableError(NO_BASE.format(source=source))
    try:
        config = transformers.AutoConfig.from_pretrained(base_model)
        kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        base = kind.from_pretrained(base_model, dtype="auto")
        with TemporaryDirectory(dir=scratch) as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            return PeftModel.from_pretrained(base, folder)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UnservableError(f"{source} cannot be merged into {base_model}: {error}") from error
