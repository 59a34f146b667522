"""The trainer's side of policy sync: publish LoRA weights so that every vLLM replica behind the proxy serves them."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from proxy.contract import LoadReport, LoadRequest, PolicyStatus
from proxy.errors import SettingsError
from trainer_client import slots
from trainer_client.errors import PublishError
from trainer_client.policies import Policy, Timings, check_run, fallen_out, may_delete
from trainer_client.proxy_api import ProxyApi
from trainer_client.publisher import Adapter, Published, publish_files
from trainer_client.stores import DirectoryStore

ANNOUNCE_TIMEOUT_S = 330.0
"""The proxy gives a load 300 s (PROXY_LORA_LOAD_TIMEOUT_S) and then rolls it back; 30 more for that and its answer."""

RETRY_TIMEOUT_S = 120.0
"""A proxy that restarts waits up to 120 s (PROXY_START_WAIT_S) for its replicas before it calls itself ready."""

CONNECT_TIMEOUT_S = 5.0
"""A connection within a cluster takes milliseconds; after 5 s nobody is there."""

log = logging.getLogger(__name__)


class TrainerClient:
    """Publish LoRA weights to a fleet of vLLM replicas, one policy after the other.

        with TrainerClient("http://localhost:8000", store="/lora", run="math-r1", max_staleness=4) as client:
            policy = client.publish(model, step=40)
            ...  # rollouts send "model": policy.model

    `url` is lora-sync-proxy's. `store` is a directory that the replicas see under the same path. `run` names this
    training run, alone in its store and fleet. `max_staleness` is how many versions a rollout may lag behind the
    newest (TRL's setting of the same name): max_staleness + 1 policies stay live, and vLLM needs one slot more (see
    `vllm_args`). `base_model` goes into the manifest; by default it is what the adapter's config names.

    `timeout_s` limits one announcement with all its repetitions, `retry_timeout_s` how long a proxy that does not
    answer or is not ready is asked again, `connect_timeout_s` each connection. All in seconds.

    Neither torch nor peft is imported. One thread publishes at a time, others wait. Raises SettingsError for
    arguments that cannot work, StoreError when the store cannot be used or another publisher of this run is at work.
    """

    def __init__(
        self,
        url: str,
        *,
        store: str | Path,
        run: str,
        max_staleness: int,
        base_model: str | None = None,
        timeout_s: float = ANNOUNCE_TIMEOUT_S,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.run = check_run(run)
        self.max_loras = slots.max_loras(max_staleness)
        """Adapters that vLLM must have room for (--max-loras): max_staleness + 2."""
        self.max_staleness = max_staleness
        self.current: Policy | None = None
        """The newest policy that this client made live, None before the first."""
        self._base_model = base_model
        self._store = DirectoryStore(Path(store), run=run)
        self._proxy = ProxyApi(
            url, timeout_s=timeout_s, retry_timeout_s=retry_timeout_s, connect_timeout_s=connect_timeout_s
        )
        self._publishing = threading.Lock()
        with self._store.claim():
            pass  # claiming removes what a killed publisher of this run has left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        current = self.current.name if self.current else None
        return f"<TrainerClient run={self.run} store={self._store.root} proxy={self._proxy.url} current={current}>"

    def publish(self, adapter: Adapter, step: int, *, allow_rewind: bool = False) -> Policy:
        """Publish an adapter and return once every replica serves it.

        `adapter` is a directory in peft's format, a PeftModel (`save_pretrained` is called on it), or (tensors,
        config): numpy arrays by peft's names, lora_A of shape (rank, inputs) and lora_B (outputs, rank), and the fields
        of its LoraConfig. `step` is the optimizer step, 0 or more.

        The bytes of the newest policy again are that policy: it is announced again and returned. A step lower than the
        newest policy's is refused unless `allow_rewind`. Afterwards policies outside the window are unloaded, and their
        files deleted once the proxy says that nobody needs them; trouble with that is logged and tried again next time.

        Raises a PublishError (see `errors`). Calling again after any failure is safe; after an AnnounceError the same
        bytes are only announced again.
        """
        if step < 0:
            raise SettingsError(f"step is {step}; give the optimizer step, 0 or more.")
        with self._publishing, self._store.claim():
            published = publish_files(
                adapter, store=self._store, step=step, base_model=self._base_model, allow_rewind=allow_rewind
            )
            began = time.perf_counter()
            report = self._announce(published)
            announced = time.perf_counter()
            self._retire()
            timings = Timings(
                stage=published.stage_s,
                check=published.check_s,
                announce=announced - began,
                retire=time.perf_counter() - announced,
            )
            self.current = _policy(published, report, timings)
            return self.current

    def vllm_args(self, lora_config: Any = None) -> list[str]:
        """Return the arguments with which `vllm serve` has room for every policy of the window.

        `lora_config` is a peft LoraConfig, its fields as a dict, an adapter's directory or a rank; without it
        --max-lora-rank is left out. Raises SettingsError for a rank that vLLM does not serve (above 512).
        """
        rank = None if lora_config is None else slots.rank_of(lora_config)
        return slots.vllm_args(max_staleness=self.max_staleness, rank=rank)

    def policies(self) -> tuple[PolicyStatus, ...]:
        """Return what the proxy knows of every policy, of other runs as well. Raises ProxyError."""
        return self._proxy.statuses()

    def close(self) -> None:
        """Close the connection to the proxy; published policies stay live. Safe to call twice."""
        self._proxy.close()

    def _announce(self, published: Published) -> LoadReport:
        manifest = published.manifest
        report = self._proxy.load(
            LoadRequest(lora_name=manifest.name, lora_path=str(published.path), policy=manifest.announcement())
        )
        for warning in report.warnings:
            log.warning("%s: %s", self._proxy.url, warning)
        return report

    def _retire(self) -> None:
        """Unload what fell out of the window. The new policy is live, so trouble here must not look like a failure."""
        try:
            names = {manifest.version: manifest.name for manifest in self._store.manifests()}
            for version in fallen_out(names, max_staleness=self.max_staleness):
                self._retire_one(names[version])
        except (PublishError, OSError) as error:
            log.warning("policies of run %s that fell out of the window stay until the next one: %s", self.run, error)

    def _retire_one(self, name: str) -> None:
        # asked for at every publish: a proxy that restarted may have found the policy on a replica again
        known = self._proxy.unload(name)
        if may_delete(self._proxy.status(name), unloaded=known or self._store.is_unloaded(name)):
            self._store.delete(name)
        else:
            self._store.mark_unloaded(name)


def _policy(published: Published, report: LoadReport, timings: Timings) -> Policy:
    manifest = published.manifest
    return Policy(
        name=manifest.name,
        version=manifest.version,
        step=manifest.step,
        digest=manifest.digest,
        path=published.path,
        timings=timings,
        report=report,
    )
