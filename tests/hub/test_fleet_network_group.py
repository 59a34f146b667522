"""A fleet in a network group: rollouts go from Job to Job directly."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.demo.processes import free_port
from tests.hub.fleets import Fleet
from tests.hub.job_network import WHY_NOT, groups_work
from tests.hub.offline_hub import OfflineHub

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(not groups_work(), reason=WHY_NOT)]


def test_rollouts_go_directly_and_a_replacement_has_a_name_of_its_own(hub: OfflineHub, tmp_path: Path) -> None:
    fleet = Fleet(hub, tmp_path)
    port = free_port()
    fleet.write(network="group", port=port, replicas={"count": 2})
    with fleet.up() as up:
        fleet.wait_served(2, up)
        before = {replica["url"] for replica in fleet.replicas_of_proxy()}
        assert {urlsplit(url).port for url in before} == {port}
        assert all("replica-" in str(urlsplit(url).hostname) for url in before), "not through the Jobs' door"
        (dead,) = fleet.jobs(number="1")
        hub.kill_job(dead.id)
        up.wait_said("in place of replica-1")
        (url,) = (url for url in before if "replica-1-" in url)
        fleet.wait_served(2, up, not_at=url)
        fleet.stop_file.touch()
        fleet.ended_with(up, 0)
    fleet.lost_nothing()
    assert "HF_TOKEN is not sent" not in "\n".join(fleet.trainer_log())
