"""Reading a host: what the driver library says becomes a topology, and what it does not say is no error."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.trainer_client.nccl.conftest import HostEnv
from trainer_client.nccl import Launcher, probe
from trainer_client.nccl.probe import hosts_of, launcher_of

PRINT = "import json; from dataclasses import asdict; from trainer_client.nccl import probe; "
PRINT += "print(json.dumps(asdict(probe())))"

Host = Callable[..., dict[str, Any]]


@pytest.fixture
def host(host_env: HostEnv) -> Host:
    """Probe, in another process, a host whose driver says this."""

    def run(**says: Any) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", PRINT], env=host_env(**says), capture_output=True, text=True, timeout=15
        )
        assert done.returncode == 0, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    return run


def test_gpus_on_nvswitches(host: Host) -> None:
    told = host(gpus=3, links=18, far_end=2)
    assert told["gpus"][2] == {
        "index": 2,
        "name": "Stub 2",
        "compute_capability": [9, 0],
        "nvlinks": 18,
        "nvswitch": True,
    }
    assert [(pair["first"], pair["second"]) for pair in told["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(pair["peer_access"] and pair["nvlink"] and pair["distance"] == 50 for pair in told["pairs"])


@pytest.mark.parametrize(("far_end", "nvswitch"), [(0, False), (2, True), (255, True)])
def test_a_far_end_that_a_virtual_machine_does_not_see_is_a_switch(host: Host, far_end: int, nvswitch: bool) -> None:
    told = host(gpus=1, links=4, far_end=far_end)
    assert (told["gpus"][0]["nvlinks"], told["gpus"][0]["nvswitch"]) == (4, nvswitch)


def test_gpus_without_nvlink(host: Host) -> None:
    told = host(gpus=2, major=8, nvlink=5, level=30)
    assert (told["gpus"][0]["nvlinks"], told["gpus"][0]["nvswitch"]) == (0, False)
    assert told["pairs"] == [{"first": 0, "second": 1, "peer_access": True, "nvlink": False, "distance": 30}]


@pytest.mark.parametrize("says", [{"read": 1}, {"write": 4}, {"one_way": 1}], ids=["no read", "no write", "one way"])
def test_peer_access_is_reading_and_writing_both_ways(host: Host, says: dict[str, int]) -> None:
    (pair,) = host(gpus=2, **says)["pairs"]
    assert not pair["peer_access"]


def test_no_driver_is_no_gpu(host: Host) -> None:
    for not_loaded in (9, 12):
        told = host(gpus=2, init=not_loaded)
        assert (told["gpus"], told["unknown"]) == ([], "")


def test_a_driver_in_trouble_is_named_and_not_taken_for_no_gpu(host: Host) -> None:
    told = host(gpus=2, init=18)
    assert (told["gpus"], told["pairs"]) == ([], [])
    assert told["unknown"].startswith("the NVIDIA driver says: ")


@pytest.mark.parametrize("nccl", [None, "2.27.5"])
def test_the_version_is_that_of_the_nccl_that_pip_installed(host: Host, nccl: str | None) -> None:
    assert host(nccl=nccl)["nccl"] == (nccl and [2, 27, 5])


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install 'lora-sync-proxy[nccl]'" in probe({}).unknown


@pytest.mark.parametrize(
    ("environ", "launcher", "hosts"),
    [
        ({}, Launcher.NONE, 1),
        ({"RAY_RAYLET_PID": "7", "CUDA_VISIBLE_DEVICES": "3"}, Launcher.RAY, 1),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, Launcher.TORCHRUN, 1),
        ({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, Launcher.TORCHRUN, 2),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "0"}, Launcher.NONE, 1),
    ],
)
def test_the_launcher_and_its_hosts(environ: dict[str, str], launcher: Launcher, hosts: int) -> None:
    assert (launcher_of(environ), hosts_of(environ)) == (launcher, hosts)


def test_a_ray_driver_says_so_itself() -> None:
    assert probe({}, launcher=Launcher.RAY).launcher is Launcher.RAY
