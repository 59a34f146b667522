"""`lora-sync status` and `lora-sync top`: the real command, in a pseudo-terminal, on a real proxy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.simulated.checks import wait_quiet
from tests.simulated.conftest import Adapters
from tests.support.proxies import RunningProxy
from tests.support.replicas import simulators
from tests.support.terminal import Terminal

pytestmark = pytest.mark.timeout(90)
"""Each test starts the command several times, and each start imports a good deal."""

COMMAND = [sys.executable, "-c", "from trainer_client.cli import main; main()"]


def told(proxy: RunningProxy, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "status", "--proxy", proxy.url, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=40)


def test_status_says_what_the_api_says(adapter: Adapters) -> None:
    with simulators(2, max_loras=4) as pair, RunningProxy(*(replica.url for replica in pair)) as proxy:
        before = told(proxy)
        assert "No policy yet" in before.stdout and "2 of 2" in before.stdout
        for version in (1, 2, 3):
            assert proxy.load(f"math-v{version}", adapter(version)).status_code == 200
            for seed in range(4):
                proxy.complete(f"math-v{version}", prompt=[version] * 64, seed=seed, temperature=1)
        proxy.unload("math-v1")
        wait_quiet(proxy, *pair)
        done = told(proxy, "--json")
        assert done.returncode == 0
        seen = json.loads(done.stdout)
        assert (seen["ready"], seen["current"], seen["slots"], seen["in_flight"]) == (2, "math-v3", 4, 0)
        assert [policy["name"] for policy in seen["policies"]] == ["math-v2", "math-v3"]
        assert seen["router"] == proxy.stats()["router"]
        assert seen["generated_tokens"] == 12 * 8
        for replica, own in zip(seen["replicas"], proxy.replicas(), strict=True):
            assert replica == {name: own[name] for name in replica}
            assert replica["prefix_cache"]["reported"]["cached_tokens"] > 0
        table = told(proxy)
        assert table.returncode == 0 and table.stderr == ""
        lines = [line.split() for line in table.stdout.splitlines()]
        assert ["math-v3", "live", "3", "-"] in [line[:4] for line in lines]
        for replica in seen["replicas"]:
            hits = replica["prefix_cache"]["reported"]
            (row,) = [line for line in lines if replica["url"].removeprefix("http://") in line]
            assert row[2:5] == ["ready", "0", f"{replica['routed']}"]
            assert row[5] == f"{hits['cached_tokens'] / hits['prompt_tokens']:.1%}"
            assert row[7:] == ["v2", "v3"]


def test_status_of_a_proxy_that_is_away_is_one_line_and_status_1() -> None:
    command = [*COMMAND, "status", "--proxy", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "http://127.0.0.1:9 did not answer" in done.stderr


def test_top_follows_the_fleet_and_a_proxy_that_goes_and_comes_back(adapter: Adapters) -> None:
    with (
        simulators(2) as pair,
        RunningProxy(*(replica.url for replica in pair)) as proxy,
        Terminal([*COMMAND, "top", "--proxy", proxy.url, "--every", "0.2"]) as terminal,
    ):
        terminal.wait("replicas ready 2 of 2", "No policy yet")
        assert proxy.load("math-v7", adapter(1)).status_code == 200
        terminal.wait("policy math-v7", "its sync took")
        for seed in range(8):
            proxy.complete("math-v7", prompt=[seed] * 64)
        routed = proxy.stats()["router"]["routed"]
        lines = terminal.wait(f"rollouts {routed} ", "unmatched")
        (speed,) = [line for line in lines if line.startswith("rollouts/s ")]
        assert float(speed.split()[1]) > 0 and float(speed.split()[3]) > 0
        assert all(len(line) <= 80 and "…" not in line for line in lines), lines

        pair[1].kill()
        terminal.wait("replicas ready 1 of 2", "1 is down: ")
        pair[1].restart()
        terminal.wait("replicas ready 2 of 2")

        proxy.kill()
        terminal.wait("NO ANSWER for", "What it said last:", "policy math-v7")
        proxy.start()
        assert proxy.load("math-v8", adapter(2)).status_code == 200
        lines = terminal.wait("replicas ready 2 of 2", "policy math-v8", "math-v7")
        assert not any("NO ANSWER" in line for line in lines)

        assert terminal.interrupt() == 0
        assert terminal.raw.endswith("\x1b[?25h\x1b[?1049l"), "the cursor and the screen before it are back"
        assert "Traceback" not in terminal.raw and "interrupted" not in terminal.raw


def test_top_waits_for_a_proxy_that_is_not_there_yet(adapter: Adapters) -> None:
    with simulators(1) as (replica,):
        proxy = RunningProxy(replica.url)
        with Terminal([*COMMAND, "top", "--proxy", proxy.url, "--every", "0.2"]) as terminal:
            terminal.wait("NO ANSWER for", f"{proxy.url} did not answer")
            with proxy:
                terminal.wait("replicas ready 1 of 1")
            assert terminal.interrupt() == 0


def test_top_needs_a_terminal() -> None:
    done = subprocess.run([*COMMAND, "top"], capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "lora-sync status --json" in done.stderr
