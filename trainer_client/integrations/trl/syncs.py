"""The syncs of one TRL trainer, each a publication. What TRL keeps of them is kept: versions, phases, who is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any

from proxy.errors import LoraSyncError
from trainer_client.adapters import peft_adapter
from trainer_client.client import TrainerClient
from trainer_client.collective import is_sharded, share
from trainer_client.outcomes import portable
from trainer_client.policies import Policy

Published = Policy | Future[Policy]


class Syncs:
    """Stands in for the `_sync_weight_lora` of one trainer."""

    def __init__(self, trainer: Any, client: TrainerClient, *, wait: bool, allow_rewind: bool) -> None:
        self._trainer = trainer
        self._client = client
        self._wait = wait
        self._allow_rewind = allow_rewind
        self._is_first = True
        self._travelling: Future[Policy] | None = None
        """The publication in the background, on the rank that makes it."""

    def __call__(self, t0: float) -> tuple[float, float, float]:
        """Publish the trained adapter as the next version, on every rank.

        `t0` is when TRL began, in `time.time()` seconds. Returns when its phases were over: the pause, which there is
        none, waiting for the publication before, and publishing. Raises a LoraSyncError if this one has failed, or the
        one before.
        """
        self._settle()
        waited = time.time()
        version = self._trainer.model_version + 1
        self._publish(version)
        if self._trainer.accelerator.is_main_process:
            # At once, so that the staleness of samples counts from the weights that the training has, not from those
            # that are served. The workers learn of it when it is served.
            self._trainer.model_version = version
        return t0, waited, time.time()

    def finish(self) -> None:
        """Wait for the publication that travels still, and raise its error, on every rank."""
        self._settle()
        failed = self._travelling.exception() if self._travelling else None
        if self._trainer.accelerator.num_processes > 1:
            failed = share(failed and portable(failed))
        if failed:
            raise failed

    def _settle(self) -> None:
        if self._travelling:
            futures.wait([self._travelling])  # each phase has a limit of its own

    def _publish(self, version: int) -> None:
        trainer = self._trainer
        is_first, self._is_first = self._is_first, False
        step = trainer.state.global_step
        adapter = peft_adapter(trainer.accelerator.unwrap_model(trainer.model), trainer._adapter_name)
        publish = partial(
            self._client.publish,
            adapter,
            step=step,
            wait=self._wait or is_first,  # the workers start right after the first, and ask for it
            allow_rewind=is_first and (self._allow_rewind or step > 0),
            alias=f"{trainer._lora_name}-v{version}",
            on_live=partial(self._tell_workers, version),
        )
        together = trainer.accelerator.num_processes == 1 or is_sharded(adapter[0].values())
        published = publish() if together else self._by_one(publish)
        # the futures of the other ranks are settled by the next publication only
        on_main = trainer.accelerator.is_main_process
        self._travelling = published if on_main and isinstance(published, Future) else None

    def _by_one(self, publish: Callable[[], Published]) -> Published | None:
        """Publish on the main process alone, where each has the whole adapter. Every one raises alike."""
        published, failed = None, None
        if self._trainer.accelerator.is_main_process:
            try:
                published = publish()
            except LoraSyncError as error:
                failed = portable(error)
        if failed := share(failed):
            raise failed
        return published

    def _tell_workers(self, version: int) -> None:
        if self._trainer.rollout_worker:
            self._trainer.rollout_worker.update_model_version(version)
