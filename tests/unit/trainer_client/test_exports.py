"""What `import trainer_client` gives, and what it must not bring along."""

from __future__ import annotations

import json
import subprocess
import sys

import trainer_client

FORBIDDEN = {"fastapi", "starlette", "uvicorn", "torch", "peft", "transformers"}
ALLOWED = {"proxy", "proxy.contract", "proxy.errors", "proxy.artifacts"}


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=15)
    return set(json.loads(ran.stdout))


def test_every_public_name_is_importable_and_listed_in_order() -> None:
    assert trainer_client.__all__ == sorted(trainer_client.__all__)
    assert all(hasattr(trainer_client, name) for name in trainer_client.__all__)


def test_every_public_object_is_listed() -> None:
    classes = {name for name, value in vars(trainer_client).items() if isinstance(value, type)}
    assert classes <= set(trainer_client.__all__)


def test_importing_brings_neither_a_server_nor_torch() -> None:
    assert not FORBIDDEN & modules_after("import trainer_client, trainer_client.cli")


def test_the_hubs_libraries_are_for_who_uses_a_bucket() -> None:
    # the command alone has them: its `jobs` are the Hub's
    opened = "import proxy.app, trainer_client; from trainer_client.stores import open_store; open_store('/x', run='y')"
    assert not {"huggingface_hub", "hf_xet"} & modules_after(opened)
    assert "hf_xet" not in modules_after("import trainer_client.cli")


def test_only_the_shared_rooms_of_the_proxy_are_imported() -> None:
    rooms = {name for name in modules_after("import trainer_client.cli") if name.split(".")[0] == "proxy"}
    assert {".".join(name.split(".")[:2]) for name in rooms} == ALLOWED
