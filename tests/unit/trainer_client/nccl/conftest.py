"""A host whose NVIDIA driver says what a test wants: a small library in the place of libnvidia-ml.so.1."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "support" / "nvml_stub.c"

HostEnv = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in for the driver's library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a stand-in for the driver's library")
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True, timeout=60)
    return folder


@pytest.fixture
def host_env(driver: Path, tmp_path: Path) -> HostEnv:
    """A factory of environments in which the driver says this, and pip has installed this NCCL."""

    def make(*, nccl: str | None = None, **says: int) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "CUDA_", "RAY_"))}
        stub = {f"STUB_{name.upper()}": str(value) for name, value in says.items()}
        return own | stub | {"LD_LIBRARY_PATH": str(driver), "HOME": str(tmp_path)} | _installed(nccl, tmp_path)

    return make


def _installed(nccl: str | None, folder: Path) -> dict[str, str]:
    if nccl is None:
        return {}
    metadata = folder / f"nvidia_nccl_cu12-{nccl}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: {nccl}\n")
    return {"PYTHONPATH": str(folder)}
