"""Hosts as data: how their GPUs are connected, written down from what their makers and cloud providers describe.

Not recordings: what a real host says is what `lora-sync nccl --json` prints there.
"""

from __future__ import annotations

from itertools import combinations

from trainer_client.nccl import Distance, Gpu, Pair, Topology

NCCL = (2, 27, 5)


def host(
    count: int,
    name: str,
    capability: tuple[int, int],
    *,
    peer_access: bool,
    distance: Distance,
    nvlinks: int = 0,
    nvswitch: bool = False,
) -> Topology:
    """A host of equal GPUs, each connected to every other in the same way."""
    return Topology(
        gpus=tuple(Gpu(index, name, capability, nvlinks, nvswitch) for index in range(count)),
        pairs=tuple(Pair(*pair, peer_access, nvlinks > 0, distance) for pair in combinations(range(count), 2)),
        nccl=NCCL,
    )


NO_GPU = Topology()
T4 = host(1, "Tesla T4", (7, 5), peer_access=False, distance=Distance.SYSTEM)
A10_X4 = host(4, "NVIDIA A10G", (8, 6), peer_access=False, distance=Distance.HOST_BRIDGE)
L4_X8 = host(8, "NVIDIA L4", (8, 9), peer_access=False, distance=Distance.SYSTEM)
A100_PCIE_X2 = host(2, "NVIDIA A100-PCIE-40GB", (8, 0), peer_access=True, distance=Distance.SWITCH)
RTX_X2 = host(2, "NVIDIA RTX A6000", (8, 6), peer_access=True, distance=Distance.NUMA_NODE)
H100_NVLINK = host(2, "NVIDIA H100 NVL", (9, 0), peer_access=True, distance=Distance.SYSTEM, nvlinks=12)
A100_NVSWITCH = host(
    8, "NVIDIA A100-SXM4-80GB", (8, 0), peer_access=True, distance=Distance.SYSTEM, nvlinks=12, nvswitch=True
)
H200_NVSWITCH = host(8, "NVIDIA H200", (9, 0), peer_access=True, distance=Distance.SYSTEM, nvlinks=18, nvswitch=True)

BRIDGED = Topology(
    gpus=tuple(Gpu(index, "NVIDIA RTX A6000", (8, 6), 4) for index in range(4)),
    pairs=tuple(
        Pair(*pair, peer_access=pair in {(0, 1), (2, 3)}, nvlink=pair in {(0, 1), (2, 3)}, distance=Distance.SYSTEM)
        for pair in combinations(range(4), 2)
    ),
    nccl=NCCL,
)
"""Two pairs with an NVLink bridge each, and nothing between the pairs."""
