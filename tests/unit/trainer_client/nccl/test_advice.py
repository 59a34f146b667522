"""`configure_nccl_env`: sets what the host asks for, never what the user has decided, and says so."""

from __future__ import annotations

import json
import logging
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import topologies
from trainer_client.nccl import Launcher, Topology, configure_nccl_env
from trainer_client.nccl.decision import SETTINGS

RAY = replace(topologies.H200_NVSWITCH, launcher=Launcher.RAY)


def test_it_sets_what_the_host_asks_for_and_nothing_else() -> None:
    environ = {"PATH": "/bin"}
    configure_nccl_env(environ, topologies.A10_X4)
    assert environ == {"PATH": "/bin", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def test_the_warning_says_what_why_how_to_undo_it_and_that_vllm_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    configure_nccl_env({}, topologies.A10_X4)
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "trainer_client.nccl.advice")
    text = record.getMessage()
    assert text.startswith("NCCL needs NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 here. Why: No pair of this host's GPUs")
    assert "start with NCCL_P2P_DISABLE=0 NCCL_SHM_DISABLE=0" in text
    assert "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 vllm serve" in text


def test_a_host_that_needs_nothing_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    advice = configure_nccl_env(environ, topologies.H100_NVLINK)
    assert (environ, advice.environment, caplog.records) == ({}, {}, [])


@pytest.mark.parametrize("value", ["0", "1", ""])
def test_a_variable_that_the_user_has_set_stays(value: str, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"NCCL_P2P_DISABLE": value}
    advice = configure_nccl_env(environ, topologies.A10_X4)
    assert environ == {"NCCL_P2P_DISABLE": value, "NCCL_SHM_DISABLE": "1"}
    assert advice.environment == environ
    stays = [record.getMessage() for record in caplog.records if "stays" in record.getMessage()]
    assert len(stays) == (value != "1"), "said once, and only if it differs"
    assert all(text.startswith(f"NCCL_P2P_DISABLE={value} from the environment stays") for text in stays)


def test_a_p2p_level_is_a_decision_about_p2p_too() -> None:
    # NCCL_P2P_DISABLE=1 would outrank it.
    environ = {"NCCL_P2P_LEVEL": "SYS"}
    advice = configure_nccl_env(environ, topologies.A10_X4)
    assert environ == {"NCCL_P2P_LEVEL": "SYS", "NCCL_SHM_DISABLE": "1"}
    assert advice.environment == environ


def test_a_configuration_file_of_nccl_is_not_overridden(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.conf"
    file.write_text("NCCL_P2P_DISABLE=0\n")
    environ = {"NCCL_CONF_FILE": str(file)}
    advice = configure_nccl_env(environ, topologies.A10_X4)
    assert environ == {"NCCL_CONF_FILE": str(file), "NCCL_SHM_DISABLE": "1"}
    assert advice.environment == {"NCCL_SHM_DISABLE": "1"}, "the file speaks for itself"
    assert any(f"NCCL_P2P_DISABLE=0 from {file} stays" in record.getMessage() for record in caplog.records)


def test_what_the_warning_tells_to_undo_is_enough() -> None:
    environ = {setting.name: setting.undo for setting in SETTINGS}
    before = dict(environ)
    for topology in (topologies.A10_X4, RAY):
        configure_nccl_env(environ, topology)
    assert environ == before


def test_called_again_it_changes_nothing_and_does_not_warn_again(caplog: pytest.LogCaptureFixture) -> None:
    environ: dict[str, str] = {}
    first = configure_nccl_env(environ, RAY)
    after = dict(environ)
    caplog.clear()
    second = configure_nccl_env(environ, RAY)
    assert environ == after
    assert second.environment == first.environment, "Ray's workers still need all of it"
    assert caplog.records == []


def test_the_runtime_env_carries_the_users_own_values_to_ray_workers() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1", "NCCL_DEBUG": "INFO"}
    assert configure_nccl_env(environ, RAY).runtime_env() == {
        "env_vars": {"NCCL_NVLS_ENABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_ALGO": "allreduce:tree"}
    }


@pytest.mark.parametrize("topology", [RAY, topologies.A10_X4], ids=["Ray", "A10"])
def test_a_bare_tree_of_the_user_stays_with_a_warning(topology: Topology, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"NCCL_ALGO": "Tree"}
    configure_nccl_env(environ, topology)
    assert environ["NCCL_ALGO"] == "Tree"
    texts = [record.getMessage() for record in caplog.records]
    assert any("broadcast and all-gather without an algorithm" in text for text in texts)


def test_everything_fits_into_json() -> None:
    environ = {"NCCL_P2P_DISABLE": "0"}
    told = json.loads(json.dumps(configure_nccl_env(environ, topologies.A10_X4).as_json()))
    assert told["set"] == {"NCCL_SHM_DISABLE": "1"}
    assert told["kept"] == [{"name": "NCCL_P2P_DISABLE", "value": "0", "where": "the environment"}]
    assert (len(told["topology"]["gpus"]), len(told["topology"]["pairs"])) == (4, 6)


def test_a_shell_reads_the_assignments_as_they_are_meant() -> None:
    advice = configure_nccl_env({"NCCL_ALGO": "allreduce:tree;broadcast:ring"}, RAY)
    done = subprocess.run(
        ["sh", "-c", f"{advice.assignments()} sh -c 'echo \"$NCCL_ALGO $NCCL_CUMEM_ENABLE\"'"],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    assert done.stdout == "allreduce:tree;broadcast:ring 0\n"
