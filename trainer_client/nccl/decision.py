"""Which NCCL variables a topology asks for, and why. Pure; nothing here looks at what the user has set.

Sources: NCCL's user guide (env.rst of 2.30) and source, tags 2.23.4 to 2.30.7; ray-project/ray#61073 for Ray on H200;
NVIDIA/nccl#1749 and #1906, which confirm the first two of its three causes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer_client.nccl.topology import Distance, Launcher, Topology

PER_FUNCTION_ALGO = (2, 24)
"""NCCL from which NCCL_ALGO takes `function:algorithms`; before, an unknown word there switched every algorithm off."""


@dataclass(frozen=True)
class Setting:
    """One environment variable of NCCL."""

    name: str
    value: str
    effect: str
    """What NCCL does differently."""
    undo: str
    """The value that stands for NCCL's own default."""


P2P_OFF = Setting("NCCL_P2P_DISABLE", "1", "no direct transfers between GPUs", "0")
SHM_OFF = Setting("NCCL_SHM_DISABLE", "1", "no transfers through shared memory: sockets or InfiniBand instead", "0")
CUMEM_OFF = Setting("NCCL_CUMEM_ENABLE", "0", "memory from cudaMalloc instead of the cuMem functions", "1")
NVLS_OFF = Setting("NCCL_NVLS_ENABLE", "0", "no reductions inside the NVSwitches (NVLink SHARP)", "2")
TREE_ALL_REDUCE = Setting("NCCL_ALGO", "allreduce:tree", "trees for all-reduce; everything else as always", "")

SETTINGS = (P2P_OFF, SHM_OFF, CUMEM_OFF, NVLS_OFF, TREE_ALL_REDUCE)
"""Every variable that this package may set."""


@dataclass(frozen=True)
class Decision:
    """What a topology asks for."""

    reason: str
    """Why these settings, or why none; one sentence."""
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be decided here and is worth a warning."""


def decide(topology: Topology) -> Decision:
    """Return the settings that this topology asks for. Never raises; what is not known asks for nothing."""
    decision = _decide(topology)
    if topology.hosts == 1:
        return decision
    return replace(decision, reason=f"{decision.reason} (One of {topology.hosts} hosts; each decides for itself.)")


def _decide(topology: Topology) -> Decision:
    # 1. nothing is known, or there is no second GPU
    if topology.unknown:
        note = f"NCCL is left as it is: {topology.unknown}. To see whether it hangs here, run `lora-sync nccl test`."
        return Decision(f"The GPUs of this host are not known: {topology.unknown}.", notes=(note,))
    if len(topology.gpus) < 2:
        found = topology.gpu_names or "no GPU"
        return Decision(f"This host has {found}: NCCL has no second GPU here to choose a transport for.")
    usable = [pair for pair in topology.pairs if pair.peer_access]
    # 2. no peer access at all
    if not usable:
        return Decision(
            f"No pair of this host's GPUs ({topology.gpu_names}) has peer access; there large broadcasts and "
            "all-reduces are known to hang over P2P or shared memory.",
            (P2P_OFF, SHM_OFF),
        )
    # 3. Ray on NVSwitches
    if topology.launcher is Launcher.RAY and topology.reduces_in_switches:
        return _ray_on_nvswitch(topology)
    # 4. some pairs have it: NCCL asks the driver about each pair and uses shared memory for the others
    if without := len(topology.pairs) - len(usable):
        return Decision(
            f"{len(usable)} of {len(topology.pairs)} pairs of GPUs ({topology.gpu_names}) have peer access, and NCCL "
            "chooses a transport for each pair.",
            notes=(
                f"{without} of {len(topology.pairs)} pairs of GPUs have no peer access: "
                "run `lora-sync nccl test` before a long training.",
            ),
        )
    # 5. all have
    way = _way(topology)
    return Decision(f"Every pair of GPUs ({topology.gpu_names}) has peer access {way}: NCCL's own choices are good.")


def _ray_on_nvswitch(topology: Topology) -> Decision:
    settings = (CUMEM_OFF, NVLS_OFF)
    reason = (
        f"Ray gives each process one of {topology.gpu_names} on NVSwitches; there the first transfer takes seconds "
        "(cuMem), all-gather may mix up the ranks (NVLS), and all-reduce hangs from 64 MB on (ring)."
    )
    if topology.nccl is not None and topology.nccl >= PER_FUNCTION_ALGO:
        return Decision(reason, (*settings, TREE_ALL_REDUCE))
    found = f"NCCL {'.'.join(map(str, topology.nccl))} is" if topology.nccl else "NCCL's version is not known, perhaps"
    return Decision(
        reason,
        settings,
        (
            f"NCCL_ALGO=allreduce:tree, which large all-reduces need here, is not set: {found} older than "
            f"{'.'.join(map(str, PER_FUNCTION_ALGO))}, which brought it. With a newer one set it yourself. "
            "A bare NCCL_ALGO=Tree is no substitute: broadcast and all-gather have no tree.",
        ),
    )


def _way(topology: Topology) -> str:
    if all(gpu.nvswitch for gpu in topology.gpus):
        return "over NVSwitches"
    if all(pair.nvlink for pair in topology.pairs):
        return "over NVLink"
    if all(pair.nvlink or pair.distance <= Distance.SWITCHES for pair in topology.pairs):
        return "over NVLink or PCIe switches"
    return "(some only across the CPU, where NCCL takes shared memory instead)"
