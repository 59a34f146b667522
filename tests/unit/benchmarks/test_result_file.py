"""Every benchmark says before it runs that its figures cannot be kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["chaos", "fuzz", "overhead", "routing", "soak", "sync"])
def test_a_file_that_cannot_be_written_is_refused_at_once(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(tmp_path / "nowhere" / "rows.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=15)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "argument --json: " in ended.stderr and "cannot be written: No such file or directory" in ended.stderr
