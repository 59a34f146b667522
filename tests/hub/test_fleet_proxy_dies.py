"""The proxy beside the trainer dies: it is started again, finds everything again, and the training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.hub.fleets import UP_S, Fleet, processes_of
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until

pytestmark = pytest.mark.timeout(240)


def test_a_proxy_that_is_killed_is_started_again(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(trainer={"command": ["sh", "-c", f"while [ ! -e {fleet.stop_file} ]; do sleep 0.1; done"]})
    with fleet.up() as up:
        wait_until(lambda: len(fleet.replicas_of_proxy()) == 3, limit_s=UP_S, what="the proxy is up")
        (proxy,) = (pid for pid, command in processes_of(hub).items() if "-m proxy.cli" in command)
        os.kill(proxy, signal.SIGKILL)
        wait_until(lambda: not fleet.replicas_of_proxy(), limit_s=UP_S, what="the proxy is gone")
        wait_until(lambda: len(fleet.replicas_of_proxy()) == 3, limit_s=UP_S, what="the proxy is up again")
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    assert "the proxy ended with status -9; starting it again" in "\n".join(fleet.trainer_log())


def test_a_proxy_that_cannot_work_ends_the_trainer_with_its_own_words(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    fleet.write(trainer={"environment": {"PROXY_PROBE_S": "often"}})
    with fleet.up() as up:
        fleet.ended_with(up, 1)
        assert "trainer | lora-sync-proxy: PROXY_PROBE_S='often' cannot be used" in up.log()
        assert "trainer | lora-sync: the proxy cannot work with its settings (status 64)" in up.log()
