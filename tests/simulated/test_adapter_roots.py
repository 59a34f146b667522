"""PROXY_ADAPTER_ROOTS: what lies elsewhere is refused before a replica hears of it, wherever links lead."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from tests.simulated.checks import right_tokens
from tests.support.proxies import RunningProxy, proxy_command
from tests.support.replicas import SimulatedReplica


def test_only_what_lies_below_a_root_is_loaded(pair: list[SimulatedReplica], tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    inside = [write_adapter(root / "run" / "policy", seed=seed) for seed, root in enumerate(roots, 1)]
    outside = write_adapter(tmp_path / "first-but-longer" / "policy", seed=3)
    (roots[0] / "leads-out").symlink_to(outside)
    (tmp_path / "leads-in").symlink_to(inside[1])
    with RunningProxy(*(r.url for r in pair), PROXY_ADAPTER_ROOTS=f"{roots[0]}, {roots[1]}") as proxy:
        loads = [replica.state()["calls"].get("POST /v1/load_lora_adapter", 0) for replica in pair]
        for path in (outside, roots[0] / "leads-out", tmp_path, Path("/etc"), tmp_path / "not-there"):
            answer = proxy.load("policy-v1", path)
            assert answer.status_code == 400, path
            message = answer.json()["error"]["message"]
            assert "PROXY_ADAPTER_ROOTS" in message and str(roots[0]) in message and str(path) in message
        assert [replica.state()["calls"].get("POST /v1/load_lora_adapter", 0) for replica in pair] == loads
        for version, path in enumerate([*inside, tmp_path / "leads-in"], 1):
            assert proxy.load(f"policy-v{version}", path).status_code == 200
            assert proxy.complete(f"policy-v{version}") == right_tokens(path)


@pytest.mark.parametrize("root", ["lora", "/lora,policies"])
def test_a_root_that_is_no_absolute_path_does_not_start(root: str) -> None:
    ended = proxy_command({"UPSTREAM_URLS": "http://127.0.0.1:9", "PROXY_ADAPTER_ROOTS": root})
    assert ended.returncode == 64
    assert "PROXY_ADAPTER_ROOTS has" in ended.stderr and "not an absolute path" in ended.stderr
