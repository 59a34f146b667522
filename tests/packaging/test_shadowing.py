"""PyPI's `proxy.py` installs a package `proxy` too: the command says so in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proxy.cli", "--version"],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=15,
    )


def test_another_owner_of_the_name_is_noticed(tmp_path: Path) -> None:
    metadata = tmp_path / "proxy_py-2.4.10.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: proxy.py\nVersion: 2.4.10\n")
    (metadata / "RECORD").write_text("proxy/__init__.py,,\nproxy/common/utils.py,,\n")
    (metadata / "top_level.txt").write_text("proxy\n")
    done = run(tmp_path)
    assert done.returncode == 64
    assert done.stderr.count("\n") == 1 and "proxy.py" in done.stderr and "pip uninstall proxy.py" in done.stderr


def test_other_distributions_do_not_disturb(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("lora-sync-proxy "), done.stderr
