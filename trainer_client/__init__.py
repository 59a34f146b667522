"""Publish LoRA weights from a training loop to every vLLM replica behind lora-sync-proxy.

    client      TrainerClient: publish, vllm_args, policies
    publisher   from an adapter to a published policy in the store
    stores      where policies are kept
    policies    what a policy is; numbering and retention
    proxy_api   the proxy over HTTP
    slots       how many adapters vLLM must have room for
    nccl/       NCCL settings from this host's topology, for weights that travel over NCCL
    errors      what can go wrong
    cli         the `lora-sync` command

Imports neither torch nor peft nor FastAPI.
"""

from __future__ import annotations

from proxy.contract import LoadReport, PolicyStatus, ReplicaLoad
from proxy.errors import LoraSyncError, SettingsError
from trainer_client.client import TrainerClient
from trainer_client.errors import AnnounceError, ProxyError, PublishError, RewindError, StoreError, UnservableError
from trainer_client.policies import Policy, Timings
from trainer_client.publisher import Adapter

__all__ = [
    "Adapter",
    "AnnounceError",
    "LoadReport",
    "LoraSyncError",
    "Policy",
    "PolicyStatus",
    "ProxyError",
    "PublishError",
    "ReplicaLoad",
    "RewindError",
    "SettingsError",
    "StoreError",
    "Timings",
    "TrainerClient",
    "UnservableError",
]
