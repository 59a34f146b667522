"""deploy/slurm/train.sbatch, run by bash: Slurm's commands and vLLM are stand-ins, the proxy and the rest are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.demo.processes import free_port
from proxy.simulator.adapters import write_adapter
from tests.support.replicas import own_code, wait_until
from tests.support.tiny_model import REPO

SCRIPT = REPO / "deploy" / "slurm" / "train.sbatch"

STAND_INS = {
    "scontrol": 'printf "%s\\n" node0 127.0.0.2 127.0.0.3',
    # srun runs its command on every node but the one that is excluded.
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        trap 'kill $(jobs -p) 2> /dev/null; wait; exit 143' TERM
        for node in 127.0.0.2 127.0.0.3; do NODE=$node "$@" > /dev/null & done
        wait
    """,
    "vllm": """
        echo "$@" > "$SHARED/vllm-flags"
        while [[ $1 != --port ]]; do shift; done
        exec python3 -m proxy.cli sim --host "$NODE" --port "$2"
    """,
    "lora-sync-proxy": 'exec python3 -m proxy.cli "$@"',
}

TRAINER = """
import json, os, sys, urllib.request
def call(path, **body):
    request = urllib.request.Request(f"http://127.0.0.1:{os.environ['PORT']}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()
call("/v1/load_lora_adapter", lora_name="policy-v1", lora_path=os.path.join(os.environ["LORA_DIR"], "v1"))
call("/v1/completions", model="policy-v1", prompt="hello", max_tokens=4)
print("trained", flush=True)
"""


@contextmanager
def batch(tmp_path: Path, *trainer: str, **stand_ins: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run the script as `sbatch` does; yield it and its folder of logs."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in {**STAND_INS, **stand_ins}.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (commands / name).chmod(0o755)
    write_adapter(tmp_path / "lora" / "v1", seed=1)
    environment = {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-2]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SHARED": str(tmp_path),
        "PORT": str(free_port()),
        "PROXY_PROBE_S": "0.2",
        **own_code(),
    }
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *trainer],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, tmp_path / "lora-sync-7"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _session_is_over(process: subprocess.Popen[str]) -> Callable[[], bool]:
    def over() -> bool:
        listed = subprocess.run(["ps", "-o", "pid=", "-s", str(process.pid)], capture_output=True, text=True)
        return not listed.stdout.strip()

    return over


def test_a_run_from_the_first_command_to_the_last(tmp_path: Path) -> None:
    with batch(tmp_path, "python3", "-c", TRAINER) as (process, logs):
        out, err = process.communicate(timeout=18)
        assert (process.returncode, out.strip()) == (0, "trained"), err + (logs / "proxy.log").read_text()
        assert "stopped with" not in (logs / "proxy.log").read_text()
        flags = (tmp_path / "vllm-flags").read_text()
        assert "--enable-lora --max-loras 6 --max-cpu-loras 12 --max-lora-rank 16" in flags
        wait_until(_session_is_over(process), what="nothing is left running")


def test_the_trainers_status_is_the_jobs(tmp_path: Path) -> None:
    with batch(tmp_path, "sh", "-c", "exit 7") as (process, _):
        process.communicate(timeout=18)
        assert process.returncode == 7
        wait_until(_session_is_over(process), what="nothing is left running")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_job_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with batch(tmp_path, "python3", "-c", "print('up', flush=True); import time; time.sleep(600)") as (process, _):
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        process.communicate(timeout=18)
        assert process.returncode == 128 + number
        wait_until(_session_is_over(process), what="nothing is left running")


def test_replicas_that_all_die_at_once_end_the_job(tmp_path: Path) -> None:
    with batch(tmp_path, "echo", "trained", vllm="exit 1") as (process, _):
        out, _err = process.communicate(timeout=18)
        assert (process.returncode, out) == (1, "")
        wait_until(_session_is_over(process), what="nothing is left running")


def test_without_a_trainer_it_says_how(tmp_path: Path) -> None:
    with batch(tmp_path) as (process, _):
        _, err = process.communicate(timeout=18)
        assert process.returncode == 64 and "usage: sbatch train.sbatch" in err
