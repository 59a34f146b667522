"""The trainer's side of policy sync: publish LoRA weights so that every vLLM replica behind the proxy serves them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from proxy.contract import PolicyStatus
from proxy.errors import SettingsError
from trainer_client import slots
from trainer_client.adapters import Adapter, Directory, Payload, StateDict, gather, opened, packed
from trainer_client.collective import is_first, share
from trainer_client.deadlines import within
from trainer_client.errors import ProxyError, PublishError
from trainer_client.lane import Lane
from trainer_client.merging.settings import Merging
from trainer_client.metrics import Metrics
from trainer_client.outcomes import Outcome, Outcomes, raise_failures
from trainer_client.policies import Policy, check_run
from trainer_client.progress import Tell, tell_nobody
from trainer_client.proxy_api import PauseMode, ProxyApi
from trainer_client.publication import Publications
from trainer_client.publisher import Terms
from trainer_client.ready import Ready
from trainer_client.retention import Garbage, Retention
from trainer_client.stores import open_store
from trainer_client.stores.policy_store import ORPHAN_AGE_S
from trainer_client.ways import OnUnservable, Ways, Weights

ANNOUNCE_TIMEOUT_S = 330.0
"""The proxy gives a load 300 s (PROXY_LORA_LOAD_TIMEOUT_S) and then rolls it back; 30 more for that and its answer."""

RETRY_TIMEOUT_S = 120.0
"""A proxy that restarts waits up to 120 s (PROXY_START_WAIT_S) for its replicas before it calls itself ready."""

RELOAD_TIMEOUT_S = 3600.0
"""Replicas read merged weights one after the other: eight, each with 300 s to drain (PROXY_DRAIN_TIMEOUT_S) and two
minutes to read 16 GB, take that long."""

CONNECT_TIMEOUT_S = 5.0
"""A connection within a cluster takes milliseconds; after 5 s nobody is there."""

STORE_TIMEOUT_S = 120.0
"""For the store's part of one publication: 600 MB at 5 MB/s. A mount that hangs never answers at all."""

CLOSE_TIMEOUT_S = 600.0
"""What one publication may take in all, with one more behind it that goes well."""

log = logging.getLogger(__name__)


class TrainerClient:
    """Publish LoRA weights to a fleet of vLLM replicas, one policy after the other.

        with TrainerClient("http://localhost:8000", store="/lora", run="math-r1", max_staleness=4) as client:
            policy = client.publish(model, step=40)
            ...  # rollouts send "model": policy.model

    `url` is lora-sync-proxy's. `store` is a directory, a bucket of the Hub (hf://buckets/NAMESPACE/NAME[/FOLDER]; the
    Hub at `endpoint`, HF_ENDPOINT unless given), or any URL of fsspec's (s3://, gs://), and `mount` the path under
    which replicas see it: a directory's own unless given. `run` names this training run, alone in its store and fleet.
    `max_staleness` is how many versions a rollout may lag behind the newest (TRL's setting of the same name):
    max_staleness + 1 policies stay live, and vLLM needs one slot more (see `vllm_args`). `keep_every` keeps the files
    of every version that it divides, as checkpoints. `base_model` goes into the manifest; by default it is what the
    adapter's config names.

    `api_key` and `admin_key` are what the proxy asks for (its PROXY_API_KEY and PROXY_ADMIN_KEY); by default those in
    the variables of the same names, or in the file that PROXY_API_KEY_FILE names.

    What vLLM cannot serve as an adapter is refused; with `on_unservable="merge"` it is merged into the base model, as
    `merging` says, and replicas read the whole model (docs/merged.md; needs the extra `merge`). A proxy
    on another machine asks for `admin_key` before that.

    `timeout_s` limits one announcement with all its repetitions, `reload_timeout_s` one of merged weights,
    `retry_timeout_s` how long a proxy that does not answer or is not ready is asked again, `connect_timeout_s` each
    connection, `store_timeout_s` what a store may take for one publication (of merged weights longer, a second for 5
    MB), and once more for retiring old ones. All in seconds. `tell` is called, in a thread of its own but for a merge,
    with a Progress at each step of a publication, and of what a load waits for that takes more than 3 s.

    Neither torch nor peft is imported unless you publish their objects. Any thread may publish; publications keep
    their order. Raises SettingsError for arguments that cannot work, StoreError when the store cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        store: str | Path,
        run: str,
        max_staleness: int,
        mount: str | Path | None = None,
        endpoint: str | None = None,
        keep_every: int | None = None,
        base_model: str | None = None,
        api_key: str | None = None,
        on_unservable: OnUnservable = "raise",
        merging: Merging | None = None,
        admin_key: str | None = None,
        timeout_s: float = ANNOUNCE_TIMEOUT_S,
        reload_timeout_s: float = RELOAD_TIMEOUT_S,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        store_timeout_s: float = STORE_TIMEOUT_S,
        tell: Tell = tell_nobody,
    ) -> None:
        self.run = check_run(run)
        self.max_loras = slots.max_loras(max_staleness)
        """Adapters that vLLM must have room for (--max-loras): max_staleness + 2."""
        self.max_staleness = max_staleness
        self.current: Policy | None = None
        """The newest policy that this client made live, None before the first."""
        if keep_every is not None and keep_every < 1:
            raise SettingsError(f"keep_every is {keep_every}; give 1 to keep every version's files, or more.")
        self._base_model = base_model
        self._on_unservable = on_unservable
        self._store = open_store(store, run=run, mount=mount, endpoint=endpoint)
        self._store_timeout_s = store_timeout_s
        self._proxy = ProxyApi(
            url,
            timeout_s=timeout_s,
            retry_timeout_s=retry_timeout_s,
            connect_timeout_s=connect_timeout_s,
            api_key=api_key,
            admin_key=admin_key,
            reload_timeout_s=reload_timeout_s,
        )
        self._retention = Retention(self._store, self._proxy, max_staleness=max_staleness)
        self._keep_every = keep_every
        self._metrics = Metrics()
        self._publications = Publications(
            self._store, self._proxy, self._retention, store_timeout_s=store_timeout_s, tell=tell
        )
        self._lane = Lane(f"lora-sync {run}", at_end=self._proxy.close)
        self._ways = Ways(
            merging or Merging(),
            base_model,
            tell,
            limits=self._publications.limits,
            newest_is_merged=self._newest_is_merged,
        )
        self._outcomes = Outcomes()
        self._handing_over = threading.Lock()
        self._closed = False
        if is_first():
            within(store_timeout_s, lambda _: self._store.prepare(), what=f"opening store {self._store.location}")
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except PublishError as failed:
            if error is None:
                raise
            log.error("%s", failed)

    def __repr__(self) -> str:
        current = self.current.name if self.current else None
        return f"<TrainerClient run={self.run} store={self._store.location} proxy={self._proxy.url} current={current}>"

    @overload
    def publish(
        self,
        adapter: Adapter,
        step: int,
        *,
        wait: Literal[True] = True,
        allow_rewind: bool = False,
        on_unservable: OnUnservable | None = None,
        alias: str | None = None,
        on_live: Callable[[], None] | None = None,
    ) -> Policy: ...

    @overload
    def publish(
        self,
        adapter: Adapter,
        step: int,
        *,
        wait: Literal[False],
        allow_rewind: bool = False,
        on_unservable: OnUnservable | None = None,
        alias: str | None = None,
        on_live: Callable[[], None] | None = None,
    ) -> Future[Policy]: ...

    @overload
    def publish(
        self,
        adapter: Adapter,
        step: int,
        *,
        wait: bool,
        allow_rewind: bool = False,
        on_unservable: OnUnservable | None = None,
        alias: str | None = None,
        on_live: Callable[[], None] | None = None,
    ) -> Policy | Future[Policy]: ...

    def publish(
        self,
        adapter: Adapter,
        step: int,
        *,
        wait: bool = True,
        allow_rewind: bool = False,
        on_unservable: OnUnservable | None = None,
        alias: str | None = None,
        on_live: Callable[[], None] | None = None,
    ) -> Policy | Future[Policy]:
        """Publish an adapter and return once every replica serves it; with `wait=False` once its bytes are copied.

        `adapter` is a directory in peft's format, a PeftModel (its one active adapter), or (tensors, config): arrays
        of numpy or tensors of torch by peft's names, lora_A of shape (rank, inputs) and lora_B (outputs, rank), and
        the fields of its LoraConfig. `step` is the optimizer step, 0 or more.

        When `publish` returns, the weights may change. Publications keep their order. One that failed after a return
        with `wait=False` is reported at the next call, as EarlierPublishError, and so is it by `close`; what that call
        was asked to publish goes on all the same. A failed publication never keeps the next one back.

        The bytes of the newest policy again are that policy: it is announced again and returned. A step lower than the
        newest policy's is refused unless `allow_rewind`. Policies outside the window are unloaded afterwards, and their
        files deleted once the proxy says that nobody needs them; trouble with that is logged and tried again next time.

        `on_unservable` is the client's unless given: `merge` merges what the fleet cannot serve as an adapter, and
        every policy of the run after it. That happens before `publish` returns, and `policy.model` is the base model's
        name.

        `alias` is a name of your own, beside the policy's, that rollouts may put into "model" until another policy gets
        it; the same bytes under another alias are a new policy. `on_live` is called as soon as every replica serves the
        policy, before old ones are unloaded: on rank 0, and in a thread of the client's.

        Of a model that FSDP2 has sharded this is a collective: every rank calls it, in the same order; rank 0
        publishes, and every rank returns or raises alike. The futures of the other ranks are settled by the next call.
        Anything else is published by one process alone.

        Raises a PublishError (see `errors`), and SettingsError for what cannot be done. Calling again after any
        failure, or after Ctrl-C, is safe: what was handed over goes on, and the same bytes are the same policy.
        """
        if step < 0:
            raise SettingsError(f"step is {step}; give the optimizer step, 0 or more.")
        self._check_open()
        began = time.perf_counter()
        given = opened(adapter)
        merges = (on_unservable or self._on_unservable) == "merge"
        together = isinstance(given, StateDict) and (given.sharded or (merges and given.model_sharded))
        mine = not together or is_first()
        terms = Terms(
            step,
            base_model=self._base_model,
            keep_every=self._keep_every,
            allow_rewind=allow_rewind,
            alias=alias,
            on_live=on_live,
        )
        with self._handing_over:
            tensors = gather(given, keep=mine) if isinstance(given, StateDict) else {}
            weights: Weights = self._packed(given, tensors) if mine else None
            begun = self._metrics.handed_over() if mine else 0
            if merges:
                weights = self._ways.taken(given, weights, terms, together=together)
            took_s = time.perf_counter() - began
            future = Future[Policy]() if weights is None else self._hand_over(weights, terms, begun, took_s)
            number = self._outcomes.add(future)
            if mine and wait:
                futures.wait([future])  # each phase has a limit of its own
            news = self._outcomes.news() if mine else ()
            if together:
                news = self._outcomes.learn(share(news))
        if not wait:
            future.add_done_callback(partial(_log_failure, step))
        self._remember(news)
        raise_failures(news, own=number)
        return future.result() if wait else future

    def vllm_args(self, lora_config: Any = None) -> list[str]:
        """Return the arguments with which `vllm serve` has room for every policy of the window.

        `lora_config` is a peft LoraConfig, its fields as a dict, an adapter's directory or a rank; without it
        --max-lora-rank is left out. Raises SettingsError for a rank that vLLM does not serve (above 512).
        """
        if lora_config is None:
            return slots.vllm_args(max_staleness=self.max_staleness)
        # a directory may be on a mount that hangs
        rank = within(self._store_timeout_s, lambda _: slots.rank_of(lora_config), what=f"reading {lora_config}")
        return slots.vllm_args(max_staleness=self.max_staleness, rank=rank)

    def policies(self) -> tuple[PolicyStatus, ...]:
        """Return what the proxy knows of every policy, of other runs as well. Raises ProxyError."""
        return self._proxy.statuses()

    @contextmanager
    def paused(self, mode: PauseMode = "keep") -> Iterator[None]:
        """Pause generation on every replica for the time of a `with` block.

        `keep` freezes the rollouts in flight (the proxy makes that real only when base weights change, since adapters
        need no pause), `wait` lets them finish first, `abort` cuts them short. It is resumed whatever happens. Under
        torch.distributed one rank does this. Raises ProxyError.
        """
        try:
            self._proxy.pause(mode)
        except ProxyError as error:
            if error.status is None:  # it may have been paused all the same
                with suppress(ProxyError):
                    self._proxy.resume()
            raise
        try:
            yield
        finally:
            self._proxy.resume()

    def gc(self, *, dry_run: bool = False, min_age_s: float = ORPHAN_AGE_S) -> list[Garbage]:
        """Remove what nobody needs in this run's part of the store, and return it; with `dry_run` only return it.

        That is what interrupted publishers have left, if it has not changed for `min_age_s` seconds, and the policies
        out of the window that the proxy says nobody needs; checkpoints stay. Raises StoreError and ProxyError.
        """
        self._check_open()
        with self._handing_over:
            collected = self._lane.submit(
                lambda: within(
                    self._store_timeout_s,
                    lambda _: self._retention.collect(dry_run=dry_run, min_age_s=min_age_s),
                    what=f"collecting garbage in {self._store.location}",
                )
            )
        return collected.result()

    def record_discarded(self, n: int, *, of: int) -> None:
        """Tell that the training has discarded `n` of `of` rollouts as too stale, all since the last call.

        It shows in `metrics`. Raises SettingsError unless 0 <= n <= of.
        """
        self._metrics.discarded(n, of=of)

    def metrics(self) -> dict[str, float]:
        """Return what this client has published and the training discarded, ready for trackio or wandb to log.

        The names begin with `lora_sync/`, and all are there from the start, as 0; docs/metrics.md explains them. Asks
        nobody, and so costs nothing. Of several ranks, rank 0 has the numbers.
        """
        return self._metrics.read()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait up to `timeout_s` seconds for the publications that go on, then close. Policies stay live.

        Raises EarlierPublishError if some have failed since the last call, PublishError if the time was too short;
        they then go on as long as the process lives, and publishing again is safe. A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if timeout_s and (pending := self._lane.pending()):
            log.warning(
                "waiting up to %g s for %d publications of run %s; Ctrl-C leaves them", timeout_s, pending, self.run
            )
        ended = self._lane.close(timeout_s)
        news = self._outcomes.news()
        if not ended:
            raise PublishError(f"publications of run {self.run} did not end within {timeout_s:g} s of closing")
        self._outcomes.cancel()
        raise_failures(news)

    def _check_open(self) -> None:
        if self._closed:
            raise SettingsError("this client is closed; make a new one.")

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except PublishError as error:
            log.error("%s", error)

    def _packed(self, given: Directory | StateDict, tensors: Mapping[str, Any]) -> Payload | Exception:
        try:
            # a directory may be on a mount that hangs
            return within(self._store_timeout_s, lambda _: packed(given, tensors), what=f"reading {given.source}")
        except Exception as error:  # noqa: BLE001  told to every rank, like any other failure
            return error

    def _hand_over(
        self, weights: Payload | Ready | Exception, terms: Terms, number: int, gather_s: float
    ) -> Future[Policy]:
        if not isinstance(weights, Exception):
            return self._lane.submit(partial(self._publish, weights, terms, number, gather_s))
        failed: Future[Policy] = Future()
        failed.set_exception(weights)
        self._metrics.failed()
        return failed

    def _publish(self, weights: Payload | Ready, terms: Terms, number: int, gather_s: float) -> Policy:
        with self._metrics.failures():
            try:
                policy, policies_live = self._publications.carry_out(weights, terms, gather_s=gather_s)
            finally:
                if isinstance(weights, Ready):
                    weights.discard()
        self.current = policy
        self._metrics.live(number, policy, policies_live=policies_live)
        return policy

    def _newest_is_merged(self) -> bool:
        merged = self._lane.submit(
            lambda: within(
                self._store_timeout_s,
                lambda _: self._publications.newest_is_merged(),
                what=f"looking at {self._store.location}",
            )
        )
        return merged.result()

    def _remember(self, news: tuple[Outcome, ...]) -> None:
        if live := [outcome.policy for outcome in news if outcome.policy]:
            self.current = max([*live, *filter(None, [self.current])], key=lambda policy: policy.version)


def _log_failure(step: int, future: Future[Policy]) -> None:
    if not future.cancelled() and (error := future.exception()):
        log.error("step %d was not published: %s", step, error)
