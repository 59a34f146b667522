"""Which variables a topology asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support import topologies
from trainer_client.nccl import Launcher, Topology, decide

NO_TRANSPORTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
RAY_ON_NVSWITCH = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "allreduce:tree"}


def asked(topology: Topology) -> dict[str, str]:
    return {setting.name: setting.value for setting in decide(topology).settings}


def under(launcher: Launcher, topology: Topology) -> Topology:
    return replace(topology, launcher=launcher)


@pytest.mark.parametrize("launcher", Launcher)
@pytest.mark.parametrize("topology", [topologies.A10_X4, topologies.L4_X8], ids=lambda one: one.gpu_names)
def test_without_peer_access_both_transports_that_need_it_are_off(topology: Topology, launcher: Launcher) -> None:
    assert asked(under(launcher, topology)) == NO_TRANSPORTS
    assert topology.gpu_names in decide(topology).reason


@pytest.mark.parametrize(
    ("topology", "way"),
    [
        (topologies.H100_NVLINK, "over NVLink:"),
        (topologies.A100_NVSWITCH, "over NVSwitches:"),
        (topologies.A100_PCIE_X2, "PCIe switches"),
        (topologies.RTX_X2, "shared memory instead"),
    ],
    ids=lambda one: one.gpu_names if isinstance(one, Topology) else "",
)
@pytest.mark.parametrize("launcher", Launcher)
def test_with_peer_access_nothing_is_set_and_the_reason_names_the_way(
    topology: Topology, way: str, launcher: Launcher
) -> None:
    decision = decide(under(launcher, topology))
    assert (decision.settings, decision.notes) == ((), ())
    assert way in decision.reason


@pytest.mark.parametrize("topology", [topologies.NO_GPU, topologies.T4], ids=["no GPU", "T4"])
@pytest.mark.parametrize("launcher", Launcher)
def test_without_a_second_gpu_there_is_nothing_to_decide(topology: Topology, launcher: Launcher) -> None:
    decision = decide(under(launcher, topology))
    assert (decision.settings, decision.notes) == ((), ())
    assert (topology.gpu_names or "no GPU") in decision.reason


def test_ray_on_nvswitches_gets_tree_for_all_reduce_alone() -> None:
    assert asked(under(Launcher.RAY, topologies.H200_NVSWITCH)) == RAY_ON_NVSWITCH


@pytest.mark.parametrize("launcher", [Launcher.NONE, Launcher.TORCHRUN])
def test_the_same_host_without_ray_is_left_alone(launcher: Launcher) -> None:
    assert asked(under(launcher, topologies.H200_NVSWITCH)) == {}


@pytest.mark.parametrize(
    ("nccl", "tree"), [((2, 23, 4), False), ((2, 24), True), ((2, 24, 3), True), ((3, 0, 0), True), (None, False)]
)
def test_tree_needs_an_nccl_that_takes_algorithms_per_function(nccl: tuple[int, ...] | None, tree: bool) -> None:
    decision = decide(replace(topologies.H200_NVSWITCH, launcher=Launcher.RAY, nccl=nccl))
    names = [setting.name for setting in decision.settings]
    assert names == ["NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", *(["NCCL_ALGO"] if tree else [])]
    # Where it cannot be set, large all-reduces still hang: that is said, not passed over.
    assert [("NCCL_ALGO=allreduce:tree" in note and "2.24" in note) for note in decision.notes] == [True] * (not tree)


def test_gpus_of_which_only_some_reach_each_other_are_left_to_nccl_with_a_warning() -> None:
    decision = decide(topologies.BRIDGED)
    assert decision.settings == ()
    assert "2 of 6 pairs" in decision.reason
    assert ["4 of 6 pairs" in note and "lora-sync nccl test" in note for note in decision.notes] == [True]


def test_several_hosts_change_nothing_but_are_named() -> None:
    two = replace(topologies.A10_X4, hosts=2, launcher=Launcher.TORCHRUN)
    assert asked(two) == NO_TRANSPORTS
    assert "One of 2 hosts" in decide(two).reason


def test_what_is_not_known_sets_nothing_and_warns() -> None:
    decision = decide(Topology(unknown="the driver is asleep"))
    assert decision.settings == ()
    assert "the driver is asleep" in decision.reason
    assert "the driver is asleep" in decision.notes[0]
