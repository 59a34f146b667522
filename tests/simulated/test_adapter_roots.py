"""PROXY_ADAPTER_ROOTS: what lies elsewhere is refused before a replica hears of it, wherever links lead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.contract import RELOAD_PATH
from proxy.simulator.adapters import write_adapter
from proxy.simulator.checkpoints import write_checkpoint
from tests.simulated.checks import held, right_tokens
from tests.support.adapters import publish
from tests.support.proxies import RunningProxy, proxy_command
from tests.support.replicas import SimulatedReplica, simulators, wait_until


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


def loads(replicas: list[SimulatedReplica]) -> list[int]:
    return [replica.state()["calls"].get("POST /v1/load_lora_adapter", 0) for replica in replicas]


@pytest.fixture
def confined(pair: list[SimulatedReplica], tmp_path: Path) -> Iterator[RunningProxy]:
    """A proxy whose only root is `tmp_path / "root"`; beside it there is a good adapter."""
    write_adapter(tmp_path / "outside", seed=3)
    (tmp_path / "root").mkdir()
    with RunningProxy(*(r.url for r in pair), PROXY_ADAPTER_ROOTS=str(tmp_path / "root")) as proxy:
        yield proxy


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"])
def test_files_that_are_links_count_as_what_they_lead_to(
    pair: list[SimulatedReplica], confined: RunningProxy, tmp_path: Path, name: str
) -> None:
    policy, before = write_adapter(tmp_path / "root" / "policy", seed=1), loads(pair)
    (policy / name).unlink(missing_ok=True)
    (policy / name).symlink_to(tmp_path / "outside" / name)
    answer = confined.load("policy-v1", policy)
    assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (400, "bad_request")
    assert f"{name} leads out of PROXY_ADAPTER_ROOTS" in answer.text and loads(pair) == before
    (policy / name).unlink()
    write_adapter(tmp_path / "root" / "blobs", seed=1)
    if (real := tmp_path / "root" / "blobs" / name).exists():
        (policy / name).symlink_to(real)  # as the Hub's cache keeps them
    assert confined.load("policy-v1", policy).status_code == 200
    assert confined.complete("policy-v1") == right_tokens(policy)


def test_a_pipe_holds_nobody_up(pair: list[SimulatedReplica], confined: RunningProxy, tmp_path: Path) -> None:
    policy = write_adapter(tmp_path / "root" / "policy", seed=1)
    (policy / "adapter_model.safetensors").unlink()
    os.mkfifo(policy / "adapter_model.safetensors")
    answer = confined.load("policy-v1", policy)
    assert answer.status_code == 400 and "adapter_model.safetensors" in answer.text


def test_a_managed_policy_holds_no_link_out_of_its_directory_with_roots_or_without(
    proxy: RunningProxy, confined: RunningProxy, pair: list[SimulatedReplica], tmp_path: Path
) -> None:
    policy, elsewhere = tmp_path / "root" / "policy", tmp_path / "root" / "elsewhere"
    manifest = publish(policy)
    (policy / "adapter_model.safetensors").rename(elsewhere)
    (policy / "adapter_model.safetensors").symlink_to(elsewhere)
    before = loads(pair)
    for either in (proxy, confined):
        answer = either.load(manifest.name, policy, policy=manifest.announcement().model_dump())
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (409, "manifest")
        assert "adapter_model.safetensors, which leads out of it" in answer.text
    assert loads(pair) == before


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside/adapter_model.safetensors", "a/../../x"])
def test_an_announcement_names_no_file_elsewhere(proxy: RunningProxy, tmp_path: Path, path: str) -> None:
    manifest = publish(tmp_path / "policy")
    announced = manifest.announcement().model_dump()
    announced["files"][0]["path"] = path
    answer = proxy.load(manifest.name, tmp_path / "policy", policy=announced)
    assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (400, "bad_request")
    assert "must name a file inside" in answer.text


def test_a_checkpoint_lies_below_a_root_with_all_its_files(
    pair: list[SimulatedReplica], confined: RunningProxy, tmp_path: Path
) -> None:
    inside, outside = (write_checkpoint(tmp_path / at / "run-v1", seed=1, shards=2) for at in ("root", "elsewhere"))
    (tmp_path / "root" / "leads-out").symlink_to(outside)
    shard = next(inside.glob("*-of-*.safetensors"))

    def refused(path: Path) -> str:
        answer = confined.client.post(RELOAD_PATH, json={"name": "run-v1", "path": str(path)})
        assert (answer.status_code, answer.headers["X-Proxy-Error"]) == (400, "bad_request"), answer.text
        return answer.text

    for path in (outside, tmp_path / "root" / "leads-out", Path("/etc"), tmp_path / "root" / ".." / "elsewhere"):
        assert "path" in refused(path)
    shard.unlink()
    shard.symlink_to(outside / shard.name)
    assert f"{shard.name} leads out of PROXY_ADAPTER_ROOTS" in refused(inside)
    assert not any("POST /collective_rpc" in replica.state()["calls"] for replica in pair)


def test_what_one_replica_holds_from_elsewhere_is_brought_to_no_other(tmp_path: Path) -> None:
    outside, inside = write_adapter(tmp_path / "outside", seed=3), write_adapter(tmp_path / "root" / "in", seed=1)
    with simulators(2) as replicas:
        assert replicas[0].load("stray-v1", outside).status_code == 200
        assert replicas[0].load("good-v2", inside).status_code == 200
        with RunningProxy(*(r.url for r in replicas), PROXY_ADAPTER_ROOTS=str(tmp_path / "root")) as proxy:
            proxy.wait_states("ready", "ready")
            assert proxy.policy("stray-v1")["state"] == "retired"
            assert "is not below PROXY_ADAPTER_ROOTS" in proxy.policy("stray-v1")["reason"]
            wait_until(lambda: "stray-v1" not in held(replicas[0]), what="it is unloaded")
            assert held(replicas[1]).keys() == {"sim", "good-v2"}
            assert proxy.completion("stray-v1").status_code == 404
            assert proxy.complete("good-v2") == right_tokens(inside)


@pytest.mark.parametrize("root", ["lora", "/lora,policies"])
def test_a_root_that_is_no_absolute_path_does_not_start(root: str) -> None:
    ended = proxy_command({"UPSTREAM_URLS": "http://127.0.0.1:9", "PROXY_ADAPTER_ROOTS": root})
    assert ended.returncode == 64
    assert "PROXY_ADAPTER_ROOTS has" in ended.stderr and "not an absolute path" in ended.stderr
