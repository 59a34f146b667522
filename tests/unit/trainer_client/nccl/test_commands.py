"""`lora-sync nccl`: for people, and for shells, vLLM's command line and Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import topologies
from tests.unit.trainer_client.nccl.conftest import HostEnv
from trainer_client.nccl import Measurement, Outcome, Topology, commands

Run = Callable[..., tuple[int, str, str]]

A10_X4 = {"gpus": 4, "major": 8, "read": 1, "write": 1, "nvlink": 1, "level": 30}
H200_X8 = {"gpus": 8, "links": 18, "far_end": 2, "nccl": "2.27.5"}
CHOSEN = "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"


@pytest.fixture
def run(host_env: HostEnv) -> Run:
    """Run `lora-sync nccl` on a host whose driver says this; returns status, stdout and stderr."""

    def call(says: dict[str, Any], *arguments: str, **environ: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", "from trainer_client.cli import main; main()", "nccl", *arguments]
        done = subprocess.run(command, env=host_env(**says) | environ, capture_output=True, text=True, timeout=20)
        return done.returncode, done.stdout, done.stderr

    return call


def test_people_read_the_gpus_what_to_set_and_why(run: Run) -> None:
    status, out, _ = run(A10_X4)
    assert status == 0
    assert out.startswith("GPUs: 1 x Stub 0, 1 x Stub 1, 1 x Stub 2, 1 x Stub 3; launcher: none; NCCL: not")
    assert f"NCCL needs {CHOSEN} here. Why: No pair" in out


def test_people_read_why_there_is_nothing_to_set(run: Run) -> None:
    status, out, err = run({"gpus": 0})
    assert (status, err) == (0, "")
    assert "Nothing to set. This host has no GPU" in out


def test_a_shell_that_evaluates_the_export_has_the_variables(run: Run) -> None:
    _, out, err = run(A10_X4, "--export")
    assert out == "export NCCL_P2P_DISABLE=1\nexport NCCL_SHM_DISABLE=1\n"
    assert "To undo it" in err, "the reasons do not get lost"


def test_an_export_leaves_what_the_user_has_set(run: Run) -> None:
    _, out, _ = run(A10_X4, "--export", NCCL_P2P_DISABLE="0")
    assert out == "export NCCL_SHM_DISABLE=1\n"


def test_an_export_of_nothing_is_empty(run: Run) -> None:
    assert run({"gpus": 2}, "--export") == (0, "", "")


def test_vllm_gets_the_variables_with_the_users_own(run: Run) -> None:
    _, out, _ = run(A10_X4, "--vllm", NCCL_SHM_DISABLE="0")
    assert out == "NCCL_SHM_DISABLE=0 NCCL_P2P_DISABLE=1\n"


def test_ray_gets_a_runtime_env(run: Run) -> None:
    _, out, err = run(H200_X8, "--ray")
    wanted = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "allreduce:tree"}
    assert json.loads(out) == {"env_vars": wanted}
    assert "Ray gives each process one of" in err


def test_the_vllm_servers_of_ray_actors_get_the_same(run: Run) -> None:
    _, out, _ = run(H200_X8, "--ray", "--vllm")
    assert out == "NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_ALGO=allreduce:tree\n"


def test_json_holds_the_topology(run: Run) -> None:
    _, out, _ = run(H200_X8, "--json")
    told = json.loads(out)
    assert (told["set"], len(told["topology"]["gpus"]), len(told["topology"]["pairs"])) == ({}, 8, 28)


def test_one_format_at_a_time(run: Run) -> None:
    status, out, err = run({"gpus": 0}, "--json", "--vllm")
    assert (status, out) == (2, "")
    assert "one of --json, --export and --vllm" in " ".join(err.replace("│", " ").split())


def test_without_the_extra_one_sentence_says_what_to_install(run: Run, host_env: HostEnv) -> None:
    code = "import sys; sys.modules['pynvml'] = None; from trainer_client.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "nccl", "--export"],
        env=host_env(gpus=2),
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'lora-sync-proxy[nccl]'" in done.stderr


def test_the_test_says_that_it_needs_torch(run: Run) -> None:
    if find_spec("torch"):
        pytest.skip("torch is installed here")
    status, out, err = run({"gpus": 2}, "test")
    assert (status, out) == (2, "")
    assert "needs torch" in err


@pytest.mark.parametrize(
    ("says", "arguments", "shown"),
    [({"gpus": 1}, (), 1), ({"gpus": 0}, (), 0), ({"gpus": 2}, ("--ranks", "3"), 2)],
)
def test_the_test_needs_a_gpu_per_rank(
    run: Run, tmp_path: Path, says: dict[str, int], arguments: tuple[str, ...], shown: int
) -> None:
    (tmp_path / "torch.py").touch()  # it only looks whether there is one
    status, out, err = run(says, "test", *arguments, PYTHONPATH=str(tmp_path))
    assert (status, out) == (2, "")
    assert f"this host shows {shown}" in err


def test_an_unknown_backend_is_refused(run: Run) -> None:
    status, _, err = run({"gpus": 2}, "test", "--backend", "mpi")
    assert status == 2
    assert "mpi is not one of nccl, gloo" in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("environ", "visible"),
    [
        ({}, ("0", "1", "2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "GPU-5a,MIG-7b"}, ("GPU-5a", "MIG-7b")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
    ],
)
def test_the_test_uses_the_gpus_that_cuda_may_use(environ: dict[str, str], visible: tuple[str, ...]) -> None:
    assert commands.visible_gpus(environ, topologies.A10_X4) == visible


def test_no_gpu_at_all_is_no_visible_gpu() -> None:
    assert commands.visible_gpus({}, Topology()) == ()


@pytest.mark.parametrize(
    ("measurements", "verdict"),
    [
        (
            [
                Measurement("all_reduce", 16 * 1024**2, Outcome.OK),
                Measurement("all_reduce", 64 * 1024**2, Outcome.HANG),
                Measurement("broadcast", 1024**3, Outcome.OK),
            ],
            "all_reduce hangs at 64 MB; up to 16 MB it works.",
        ),
        ([Measurement("all_gather", 4096, Outcome.WRONG)], "all_gather gives wrong values at 4 KB."),
        ([Measurement("all_reduce", 0, Outcome.FAILED)], "all_reduce fails before the first size"),
    ],
    ids=["hang", "wrong", "start"],
)
def test_the_verdict_names_operation_and_size(measurements: list[Measurement], verdict: str) -> None:
    assert commands.verdict(measurements).startswith(verdict)


def test_no_verdict_when_all_is_good() -> None:
    assert commands.verdict([Measurement("all_reduce", 4096, Outcome.OK)]) == ""
