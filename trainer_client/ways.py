"""Which way an adapter goes to the replicas: as it is, or merged into its base model, which happens here.

It is decided, and merged, before the training goes on: afterwards the weights may change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.artifacts.config import parse_config
from proxy.artifacts.digest import CONFIG_FILE, load_config
from proxy.artifacts.verdict import Way
from proxy.errors import SettingsError
from trainer_client.adapters import Directory, Payload, StateDict
from trainer_client.collective import share
from trainer_client.errors import StoreError
from trainer_client.fleet import FleetLimits
from trainer_client.merging.scratch import Scratch
from trainer_client.merging.settings import Merging
from trainer_client.progress import Tell
from trainer_client.publisher import Terms
from trainer_client.ready import Ready, as_checkpoint, described, judged

Weights = Payload | Ready | Exception | None
"""What was copied, or why it could not be; None on a rank that only helps."""

OnUnservable = Literal["raise", "merge"]
"""What becomes of an adapter that cannot be served as one."""

log = logging.getLogger(__name__)


@dataclass
class Ways:
    """Decides for one client that merges what cannot be served as an adapter."""

    merging: Merging
    base_model: str | None
    """What the client was told to merge into, where only an adapter's files are there."""
    tell: Tell
    limits: Callable[[], FleetLimits]
    newest_is_merged: Callable[[], bool]
    """Asks the store, which may take a while."""
    _all_merged: bool | None = field(default=None, init=False)
    """Whether replicas have merged weights in place of the base model's from now on; None: not known yet."""

    def taken(self, given: Directory | StateDict, weights: Weights, terms: Terms, *, together: bool) -> Weights:
        """Return what is to be published: the adapter, or a checkpoint that every rank has helped to merge.

        A collective if `together`. Raises nothing: an error is returned, for every rank to be told of it.
        """
        why = ""
        if isinstance(weights, Payload):
            try:
                weights, why = self._decided(weights, terms)
            except Exception as error:  # noqa: BLE001  told to every rank, like any other failure
                weights = error
        if together:
            why = share(why)
        if not why:
            return weights
        log.info("step %d is merged into the base model: %s", terms.step, why)
        try:
            ready = self._merged(given, weights)
        except Exception as error:  # noqa: BLE001  as above
            return None if weights is None else error
        self._all_merged = True
        return ready

    def _decided(self, payload: Payload, terms: Terms) -> tuple[Payload | Ready, str]:
        """Return the weights and why they are to be merged, empty if they are not."""
        found, verdict = judged(payload, step=terms.step, limits=self.limits())
        if self._all_merged is None:
            self._all_merged = self.newest_is_merged()
        why = "" if verdict.way is Way.ADAPTER else str(verdict)
        if not why and self._all_merged:
            why = "what replicas serve in place of the base model is this run's policy, merged"
        if not why:
            return described(payload, found), ""
        if terms.alias is not None:
            raise SettingsError(
                f"alias {terms.alias!r} cannot be had for step {terms.step}, which is merged into the base model "
                f"({why}) and served under its name"
            )
        return payload, why

    def _merged(self, given: Directory | StateDict, weights: Weights) -> Ready | None:
        try:
            from trainer_client.merging.load import loaded
            from trainer_client.merging.merge import merge
        except ImportError as error:
            raise SettingsError(
                f"merging needs torch, transformers and peft ({error}): pip install 'lora-sync-proxy[merge]'"
            ) from error
        options: dict[str, Any] = {"max_shard_bytes": self.merging.max_shard_bytes, "tell": self.tell}
        model: Any = given.model if isinstance(given, StateDict) else None
        if weights is None:
            merge(model, None, adapter=model.active_adapters[0], dtype=None, **options)
            return None
        assert isinstance(weights, Payload)
        named = _base_of(weights)
        try:
            scratch = Scratch(self.merging.scratch)
        except OSError as error:
            raise StoreError(f"no folder for the merged checkpoint can be made: {error}") from error
        try:
            base = self.base_model or named
            model = model or loaded(weights.files(), base_model=base, source=weights.source, scratch=scratch.path)
            dtype = self.merging.dtype or self.limits().dtype
            paths = merge(model, scratch.path, adapter=model.active_adapters[0], dtype=dtype, **options)
            return as_checkpoint(paths, base_model=named, scratch=scratch)
        except BaseException as error:
            scratch.discard()
            if isinstance(error, OSError):
                raise StoreError(f"the merged checkpoint cannot be written to {scratch.path}: {error}") from error
            raise


def _base_of(payload: Payload) -> str:
    return parse_config(load_config(payload.config, source=CONFIG_FILE), source=CONFIG_FILE).base_model
