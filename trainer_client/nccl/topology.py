"""What is known of a host before NCCL starts. Plain data: `probe` reads it, tests write it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum, StrEnum

HOPPER = (9, 0)
"""Compute capability from which NVSwitches reduce in the network (NVLink SHARP; NCCL's NCCL_NVLS_ENABLE)."""


class Distance(IntEnum):
    """The PCIe path between two GPUs, nearest first. The numbers are NVML's (`nvmlGpuTopologyLevel_t`)."""

    BOARD = 0
    """On one board."""
    SWITCH = 10
    """Through one PCIe switch."""
    SWITCHES = 20
    """Through several PCIe switches, but through no host bridge."""
    HOST_BRIDGE = 30
    """Through one host bridge of the CPU."""
    NUMA_NODE = 40
    """Through host bridges of one NUMA node."""
    SYSTEM = 50
    """Across NUMA nodes."""


class Launcher(StrEnum):
    """Who starts the processes that NCCL connects."""

    NONE = "none"
    """Nobody that is known: one process, or a launcher that leaves no mark."""
    TORCHRUN = "torchrun"
    """Every process sees all GPUs of its host."""
    RAY = "ray"
    """Every process sees one GPU (CUDA_VISIBLE_DEVICES), and they start one after the other."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, under the number that NVML gives it: CUDA_VISIBLE_DEVICES changes nothing here."""

    index: int
    name: str
    """As the driver tells it, e.g. "NVIDIA A10G"."""
    compute_capability: tuple[int, int]
    nvlinks: int = 0
    """NVLinks that are up."""
    nvswitch: bool = False
    """At least one of them ends at an NVSwitch."""


@dataclass(frozen=True)
class Pair:
    """How two GPUs of one host reach each other; `first` and `second` are numbers of GPUs."""

    first: int
    second: int
    peer_access: bool
    """The driver lets each read and write the other's memory."""
    nvlink: bool
    """... over NVLink, directly or through NVSwitches."""
    distance: Distance


@dataclass(frozen=True)
class Topology:
    """One host: its GPUs, each pair of them once, and how the job runs."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    launcher: Launcher = Launcher.NONE
    hosts: int = 1
    """Hosts of the job, as far as the launcher tells. The GPUs of the others are not in here."""
    nccl: tuple[int, ...] | None = None
    """Version of the NCCL that pip installed, e.g. (2, 27, 5); None if there is none: some images bring their own."""
    unknown: str = ""
    """Why nothing could be read; empty if all was."""

    @property
    def gpu_names(self) -> str:
        """The GPUs in words: "4 x NVIDIA A10G"."""
        return ", ".join(f"{count} x {name}" for name, count in Counter(gpu.name for gpu in self.gpus).items())

    @property
    def reduces_in_switches(self) -> bool:
        """All GPUs hang on NVSwitches that can reduce (H200 class: Hopper or newer)."""
        return bool(self.gpus) and all(gpu.nvswitch and gpu.compute_capability >= HOPPER for gpu in self.gpus)
