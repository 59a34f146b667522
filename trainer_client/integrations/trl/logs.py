"""TRL's logs: count the samples that it drops as too stale, and show in them what the client has counted."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from trainer_client.client import TrainerClient
from trainer_client.integrations.trl.shape import DROPPED, TAKEN
from trainer_client.integrations.trl.syncs import Syncs

log = logging.getLogger(__name__)


class Logs(TrainerCallback):  # type: ignore[misc]  # untyped where transformers is not installed
    """A callback of the trainer's. It comes after TRL's own, so that a step's sync is over when it is called.

    TRL gathers metrics in lists, which `log` reduces and then empties.
    """

    def __init__(self, trainer: Any, client: TrainerClient, syncs: Syncs) -> None:
        self._trainer = trainer
        self._client = client
        self._syncs = syncs
        self._counted = (0, 0)
        """Samples dropped and taken that were counted since TRL emptied its lists."""
        self._sees_samples: bool | None = None
        """Whether TRL counts samples as expected; None: that is not known yet."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the samples of the step; if TRL is about to log, give it the client's numbers."""
        if not self._trainer.accelerator.is_main_process:
            return
        self._count()
        if control.should_log:
            if self._sees_samples is None:
                self._sees_samples = False
                log.warning("TRL has no %s in its metrics: the share of discarded rollouts stays unknown", TAKEN)
            self._lists.update({name: [value] for name, value in self._client.metrics().items()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Begin to count anew: what TRL has just logged, it empties. In an evaluation it logs other lists."""
        if TAKEN in logs or DROPPED in logs:
            self._counted = (0, 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the publication that travels still. Raises its error."""
        self._syncs.finish()

    @property
    def _lists(self) -> dict[str, list[Any]]:
        lists: dict[str, list[Any]] = self._trainer._metrics["train"]
        return lists

    def _count(self) -> None:
        lists = self._lists
        dropped, taken = int(sum(lists.get(DROPPED, []))), len(lists.get(TAKEN, []))
        before_dropped, before_taken = self._counted
        self._counted = (dropped, taken)
        self._sees_samples = taken > 0 or self._sees_samples
        n = dropped - before_dropped
        self._client.record_discarded(n, of=n + taken - before_taken)
