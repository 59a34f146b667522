"""NCCL that does not hang: settings that follow from how this host's GPUs are connected, and a test with deadlines.

    topology   what is known of a host: GPUs, pairs, launcher, NCCL's version. Data
    probe      reads it, through nvidia-ml-py (the extra `nccl`)
    decision   which variables it asks for, and why. Pure
    user       what the user has set, in the environment or in NCCL's configuration files
    advice     puts both together: `configure_nccl_env`
    sweep      all-reduce, broadcast and all-gather of growing sizes in processes that are always ended
    rank       one such process; the only file here that needs torch
    commands   `lora-sync nccl` and `lora-sync nccl test`

`docs/nccl.md` is for users.
"""

from __future__ import annotations

from trainer_client.nccl.advice import NcclAdvice, advise, configure_nccl_env
from trainer_client.nccl.decision import Decision, Setting, decide
from trainer_client.nccl.probe import probe
from trainer_client.nccl.sweep import Measurement, Outcome, Sweep
from trainer_client.nccl.topology import Distance, Gpu, Launcher, Pair, Topology

__all__ = [
    "Decision",
    "Distance",
    "Gpu",
    "Launcher",
    "Measurement",
    "NcclAdvice",
    "Outcome",
    "Pair",
    "Setting",
    "Sweep",
    "Topology",
    "advise",
    "configure_nccl_env",
    "decide",
    "probe",
]
