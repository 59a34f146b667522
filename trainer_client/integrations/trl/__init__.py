"""TRL's asynchronous GRPO with a TrainerClient: `use(trainer, client)`, and every sync is a publication.

    syncs   what stands in for TRL's own sync
    logs    TRL's logs: what it discards is counted, what was published is shown
    shape   what of TRL has to be there, and is looked for

A sync of TRL's pauses vLLM, saves the adapter below `output_dir`, which every replica has to see under that path, and
waits until it is loaded. Published instead, the adapter goes by the client's store, and generation goes on. TRL's
rollout process asks for `trl-policy-vN` as ever: each policy is announced with this alias. In one trainer object one
method is replaced; TRL's files and classes stay as they are.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from proxy.errors import SettingsError
from trainer_client.client import TrainerClient
from trainer_client.integrations.trl.shape import SYNC, lacks
from trainer_client.integrations.trl.syncs import Syncs

KNOWN = "1.14 to 1.16"
"""The versions of TRL whose source was read for `shape` and `syncs` (scripts/check-trl reads it again)."""

log = logging.getLogger(__name__)


def use(trainer: Any, client: TrainerClient, *, wait: bool = True, allow_rewind: bool = False) -> None:
    """Let every sync of an `AsyncGRPOTrainer` be a publication of `client`, from the next `trainer.train()` on.

    Call it after the trainer was made and before it trains, on every rank. With `wait=False` the training goes on while
    a policy travels, one at a time: a sync first waits for the one before. Rollouts are asked of the new policy from
    the moment in which every replica serves it; their staleness counts from the sync. The first sync always waits.

    A publication that fails is raised from the sync, and so from `trainer.train()`; one in the background from the next
    sync, or at the end of the training. A training that goes on from a checkpoint may publish a lower step than the
    run's newest policy; one that begins anew may not, unless `allow_rewind`: give it a run of its own.

    `client.metrics()` is added to what TRL logs, and the samples that TRL drops as too stale are counted in it.

    Raises SettingsError if this TRL is not built as expected, if it syncs merged weights rather than an adapter, if its
    `max_staleness` is not the client's, or when called twice for one trainer.
    """
    if isinstance(getattr(trainer, SYNC, None), Syncs):
        raise SettingsError("this trainer publishes through a TrainerClient already; call use() once.")
    if missing := lacks(trainer):
        raise SettingsError(
            f"TRL {_version()} is not built as expected: {'; '.join(missing)}. It is known of TRL {KNOWN}: take one of "
            "these, or leave use() out, and TRL syncs through the proxy by itself."
        )
    if not trainer._lora_sync:
        raise SettingsError(
            "TRL syncs merged weights here, not an adapter: the model has no LoRA, or one that vLLM cannot serve, the "
            "replicas run without --enable-lora, or the trainer was given a weight_transfer. TRL's log says which."
        )
    if trainer.args.max_staleness != client.max_staleness:
        raise SettingsError(
            f"max_staleness is {trainer.args.max_staleness} in TRL's config and {client.max_staleness} in the "
            "TrainerClient; give both the same, so that what TRL still takes stays loaded and nothing else does."
        )
    from trainer_client.integrations.trl.logs import Logs  # brings transformers along

    syncs = Syncs(trainer, client, wait=wait, allow_rewind=allow_rewind)
    setattr(trainer, SYNC, syncs)
    trainer.add_callback(Logs(trainer, client, syncs))
    log.info("TRL %s publishes as run %s, %s", _version(), client.run, "and waits" if wait else "in the background")


def _version() -> str:
    try:
        return version("trl")
    except PackageNotFoundError:
        return "of an unknown version"
