"""`lora-sync-proxy demo`: a whole training run in small that loses nothing and mixes nothing up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.proxies import proxy_command

KEYS = {"rollouts", "failures", "policies", "sync_p50_s", "affinity", "spilled", "unmatched", "wrong_tokens"}


def test_a_summary_that_cannot_be_written_is_said_before_the_run(tmp_path: Path) -> None:
    ended = proxy_command({}, "demo", "--json", str(tmp_path / "nowhere" / "summary.json"))
    said = f"lora-sync-proxy: --json {tmp_path}/nowhere/summary.json cannot be written: No such file or directory.\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (64, "", said)


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "proxy.cli", "demo", "--seconds", "1"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=15)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert ended.stderr.endswith("lora-sync-proxy: its output cannot be written: No space left on device\n")


def test_six_seconds(tmp_path: Path) -> None:
    ended = proxy_command({}, "demo", "--seconds", "6", "--json", str(tmp_path / "summary.json"), timeout_s=19)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(ended.stdout)
    assert summary.keys() >= KEYS
    assert (summary["failures"], summary["wrong_tokens"], summary["first_failure"]) == (0, 0, "")
    assert summary["rollouts"] > 40
    assert summary["policies"] >= 2
    assert 0 < summary["sync_p50_s"] < 5
    assert summary["affinity"] > summary["unmatched"] > 0
    assert re.fullmatch(r"status page: http://127\.0\.0\.1:\d+/proxy/dashboard", ended.stderr.splitlines()[0])
    assert "rollouts" in ended.stderr
    assert "Traceback" not in ended.stderr
