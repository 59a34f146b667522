"""Publish LoRA weights from a training loop to every vLLM replica behind lora-sync-proxy.

    client      TrainerClient: publish, paused, policies, gc, vllm_args
    adapters    what can be published, and how its bytes are gathered
    ways        which way it goes: as an adapter, or merged into the base model
    merging/    ... merged: `pip install lora-sync-proxy[merge]`
    ready       ... judged and described, whichever way it goes
    fleet       what the fleet can serve
    collective  ... when they are sharded over several processes (FSDP2)
    lane        publications in the background, one after the other
    outcomes    ... and what became of each, told once
    publication ... each carried out: stored, announced, old ones retired
    publisher   from an adapter's bytes to a published policy in the store
    stores/     where policies are kept: a directory, a bucket of the Hub, or whatever fsspec reaches
    policies    what a policy is; the rules for numbering and retiring
    retention   ... carried out
    proxy_api   the proxy over HTTP
    metrics     what was published and discarded, as numbers to log
    slots       how many adapters vLLM must have room for
    deadlines   a limit for work that has none of its own
    integrations/  trainers that publish without knowing it: trl
    jobs/       a whole fleet on Hugging Face Jobs: `lora-sync jobs`
    nccl/       NCCL settings from this host's topology, for weights that travel over NCCL
    status/     a running proxy in the terminal
    errors      what can go wrong
    progress    how far a publication is
    cli         the `lora-sync` command; `tables` and `bars` are what it prints for people

Imports neither torch nor peft nor FastAPI.
"""

from __future__ import annotations

from proxy.contract import LoadReport, PolicyStatus, ReloadReport, ReplicaLoad, ReplicaReload
from proxy.errors import LoraSyncError, SettingsError
from trainer_client.adapters import Adapter
from trainer_client.client import TrainerClient
from trainer_client.errors import (
    AnnounceError,
    EarlierPublishError,
    ProxyError,
    PublishError,
    RewindError,
    StoreError,
    UnservableError,
)
from trainer_client.merging.settings import Merging
from trainer_client.policies import Policy, Timings
from trainer_client.progress import Progress
from trainer_client.retention import Garbage

__all__ = [
    "Adapter",
    "AnnounceError",
    "EarlierPublishError",
    "Garbage",
    "LoadReport",
    "LoraSyncError",
    "Merging",
    "Policy",
    "PolicyStatus",
    "Progress",
    "ProxyError",
    "PublishError",
    "ReloadReport",
    "ReplicaLoad",
    "ReplicaReload",
    "RewindError",
    "SettingsError",
    "StoreError",
    "Timings",
    "TrainerClient",
    "UnservableError",
]
