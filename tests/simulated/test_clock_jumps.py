"""The wall clock is set while everything runs: nothing that waits, ends or is named depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated.checks import Traffic, assert_served_by_all, right_tokens, upstream_of, wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators, wait_until

DAY_S = 86_400


class _Jumping(RunningProxy):
    """A proxy whose wall clock is off by what `offset` says."""

    def __init__(self, *replicas: str, offset: Path) -> None:
        super().__init__(*replicas)
        offset.write_text("0")
        self.within = ("env", "bash", "-c", f'exec "$1" -m tests.support.jumping_clock {offset} proxy.cli', "-")


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_rollouts_and_syncs_go_on(adapter: Adapters, tmp_path: Path, jump_s: int) -> None:
    offset = tmp_path / "offset"
    with simulators(2) as pair, _Jumping(*(r.url for r in pair), offset=offset) as proxy:
        assert proxy.load("clock-v1", adapter(1)).status_code == 200
        with Traffic(proxy, {"clock-v1": adapter(1)}) as traffic:
            traffic.wait_more(10)
            offset.write_text(str(jump_s))
            traffic.wait_more(10)
            assert proxy.load("clock-v2", adapter(2)).status_code == 200
            traffic.serve("clock-v2", adapter(2))
            traffic.wait_more(20)
            assert [(replica["state"], replica["joins"]) for replica in proxy.replicas()] == [("ready", 1)] * 2
        assert proxy.unload("clock-v1").status_code == 200
        wait_until(lambda: proxy.policy("clock-v1")["state"] == "retired", what="it is unloaded")
        assert_served_by_all(pair, "clock-v2", adapter(2))
        wait_quiet(proxy, *pair)


def test_a_name_that_comes_back_after_the_clock_was_set_back_is_still_a_new_one(
    adapter: Adapters, tmp_path: Path
) -> None:
    """Generations are seconds since 1970, but never lower than one that a replica has shown (P1)."""
    offset = tmp_path / "offset"
    with simulators(2) as pair, _Jumping(*(r.url for r in pair), offset=offset) as proxy:
        assert proxy.load("clock-v1", adapter(1)).status_code == 200
        before = upstream_of(pair[0], "clock-v1")
        offset.write_text(str(-DAY_S))
        proxy.kill()
        proxy.start()
        assert proxy.load("clock-v1", adapter(2)).status_code == 200
        wait_until(lambda: upstream_of(pair[0], "clock-v1") != before, what="a new generation")
        assert upstream_of(pair[0], "clock-v1") > before
        assert proxy.complete("clock-v1") == right_tokens(adapter(2))
        wait_quiet(proxy, *pair)
