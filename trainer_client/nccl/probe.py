"""Read this host's topology. NVML tells of all GPUs of the host or container, whatever CUDA_VISIBLE_DEVICES says.

Nothing here starts CUDA, so it is safe before a fork and before any process has chosen its GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import combinations
from types import ModuleType
from typing import Any

from trainer_client.nccl.topology import Distance, Gpu, Launcher, Pair, Topology

READ, WRITE, NVLINK = 0, 1, 2
"""`nvmlGpuP2PCapsIndex_t`. Written out, because nvidia-ml-py up to 13.615 has NVML_P2P_CAPS_INDEX_READ as a tuple."""

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""What PyTorch's wheels for CUDA depend on."""

NO_BINDING = "nvidia-ml-py is not installed; pip install 'lora-sync-proxy[nccl]'"


def probe(environ: Mapping[str, str] = os.environ, *, launcher: Launcher | None = None) -> Topology:
    """Return this host's topology; `unknown` says what is in the way. Never raises.

    `launcher` is read from `environ` if not given: a process that torchrun or Ray has started knows it. A Ray driver
    does not; it gives Launcher.RAY for the actors that it will start.
    """
    topology = Topology(launcher=launcher or launcher_of(environ), hosts=hosts_of(environ), nccl=nccl_version())
    try:
        import pynvml
    except ImportError:
        return replace(topology, unknown=NO_BINDING)
    try:
        with _nvml(pynvml) as handles:
            gpus = tuple(_gpu(pynvml, index, handle) for index, handle in enumerate(handles))
            pairs = tuple(
                _pair(pynvml, first, second, handles[first], handles[second])
                for first, second in combinations(range(len(handles)), 2)
            )
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return topology
    except pynvml.NVMLError as error:
        return replace(topology, unknown=f"the NVIDIA driver says: {error}")
    return replace(topology, gpus=gpus, pairs=pairs)


def launcher_of(environ: Mapping[str, str]) -> Launcher:
    """Return who started this process.

    Ray's raylet gives each worker RAY_RAYLET_PID (src/ray/raylet/worker_pool.cc), torchrun TORCHELASTIC_RUN_ID.
    """
    if "RAY_RAYLET_PID" in environ:
        return Launcher.RAY
    return Launcher.TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else Launcher.NONE


def hosts_of(environ: Mapping[str, str]) -> int:
    """Return the number of hosts that torchrun's variables tell of; 1 if they are not there."""
    processes, per_host = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not (processes.isdecimal() and per_host.isdecimal() and int(per_host)):
        return 1
    return max(1, -(-int(processes) // int(per_host)))


def nccl_version() -> tuple[int, ...] | None:
    """Return the oldest NCCL that pip has installed, e.g. (2, 27, 5); None if it has none."""
    found = []
    for package in NCCL_PACKAGES:
        try:
            found.append(tuple(int(part) for part in version(package).split(".")[:3]))
        except (PackageNotFoundError, ValueError):
            continue
    return min(found, default=None)


@contextmanager
def _nvml(pynvml: ModuleType) -> Iterator[list[Any]]:
    pynvml.nvmlInit()
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: ModuleType, index: int, handle: Any) -> Gpu:
    ends = [_far_end(pynvml, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    up = [end for end in ends if end is not None]
    # As NCCL does (src/graph/xml.cc): what a virtual machine does not see at the far end is a switch.
    switches = {pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN}
    return Gpu(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        nvlinks=len(up),
        nvswitch=bool(switches & set(up)),
    )


def _far_end(pynvml: ModuleType, handle: Any, link: int) -> int | None:
    """The kind of device at the far end of an NVLink, None if the link is down or the GPU has no such link."""
    try:
        if not pynvml.nvmlDeviceGetNvLinkState(handle, link):
            return None
        return int(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
        return None


def _pair(pynvml: ModuleType, first: int, second: int, one: Any, other: Any) -> Pair:
    def good(capability: int) -> bool:
        ways = ((one, other), (other, one))
        return all(pynvml.nvmlDeviceGetP2PStatus(*way, capability) == pynvml.NVML_P2P_STATUS_OK for way in ways)

    return Pair(
        first=first,
        second=second,
        peer_access=good(READ) and good(WRITE),
        nvlink=good(NVLINK),
        distance=Distance(pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)),
    )
