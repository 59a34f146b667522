"""One publication from the moment in which its bytes are copied: into the store, to the proxy, and old ones away."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from proxy.artifacts.manifest import Manifest
from proxy.contract import LoadReport, LoadRequest, ReloadReport, ReloadRequest
from trainer_client.adapters import Payload
from trainer_client.deadlines import within
from trainer_client.errors import ProxyError, PublishError
from trainer_client.fleet import FleetLimits, other_base
from trainer_client.policies import Policy, Timings
from trainer_client.progress import Progress, Tell, tell_nobody
from trainer_client.proxy_api import ProxyApi
from trainer_client.publisher import Published, Terms, publish_files
from trainer_client.ready import Ready
from trainer_client.retention import Retention
from trainer_client.stores.policy_store import PolicyStore
from trainer_client.waiting import telling_waits

SLOWEST_STORE = 5_000_000
"""Bytes a second: a store that takes fewer of a checkpoint is given up, as one that takes 600 MB in 120 s would be."""

log = logging.getLogger(__name__)


class Publications:
    """The publications of one run, carried out one after the other."""

    def __init__(
        self,
        store: PolicyStore,
        proxy: ProxyApi,
        retention: Retention,
        *,
        store_timeout_s: float,
        tell: Tell = tell_nobody,
    ) -> None:
        self._store = store
        self._proxy = proxy
        self._retention = retention
        self._store_timeout_s = store_timeout_s
        self._tell = tell
        self._limits = FleetLimits()
        self._warned: set[str] = set()
        """Warnings of which one is enough."""

    def carry_out(self, weights: Payload | Ready, terms: Terms, *, gather_s: float) -> tuple[Policy, int | None]:
        """Publish, announce and retire. Return the policy, and how many of the run are live, None if that is unknown.

        Raises a PublishError. Trouble with retiring is no failure, since the policy is live: it is logged.
        """
        limits = self.limits()
        size = weights.size if isinstance(weights, Ready) else 0
        published = within(
            max(self._store_timeout_s, size / SLOWEST_STORE),
            lambda deadline: publish_files(
                weights, terms, store=self._store, limits=limits, deadline=deadline, tell=self._tell
            ),
            what=f"writing step {terms.step} into {self._store.location}",
        )
        self._warn_of_other_base(published.manifest, limits)
        if published.manifest.merged:  # before replicas have the new weights, to which they would apply the adapters
            within(
                self._store_timeout_s, lambda _: self._retention.unload_adapters(), what="unloading adapters of before"
            )
        began = time.perf_counter()
        self._tell(Progress("loading on every replica"))
        report = self._announce(published)
        announced = time.perf_counter()
        if terms.on_live:
            terms.on_live()
        live = self._retire()
        timings = Timings(
            gather=gather_s,
            check=published.check_s,
            store=published.store_s,
            announce=announced - began,
            retire=time.perf_counter() - announced,
        )
        return _policy(published, report, timings), live

    def limits(self) -> FleetLimits:
        """Return what the fleet can serve, as soon as it has told once.

        A proxy that does not answer now is waited for by the announcement, and checks the rank as well.
        """
        if not self._limits.known:
            with suppress(ProxyError):
                self._limits = self._proxy.limits()
        return self._limits

    def newest_is_merged(self) -> bool:
        """Tell whether the run's newest policy in the store is a merged one. Raises StoreError."""
        with self._store.claim():
            newest = self._store.contents().newest
        return newest is not None and newest.merged

    def _announce(self, published: Published) -> LoadReport | ReloadReport:
        manifest, path = published.manifest, str(published.path)
        policy = manifest.announcement()
        report: LoadReport | ReloadReport
        if manifest.merged:
            report = self._proxy.reload(ReloadRequest(name=manifest.name, path=path, policy=policy))
            self._warn_of_lacking(report)
        else:
            with telling_waits(self._tell, self._proxy, manifest.name, path):
                report = self._proxy.load(LoadRequest(lora_name=manifest.name, lora_path=path, policy=policy))
        for warning in report.warnings:
            log.warning("%s: %s", self._proxy.url, warning)
        return report

    def _warn_of_other_base(self, manifest: Manifest, limits: FleetLimits) -> None:
        if (said := other_base(manifest.base_model, limits)) and said not in self._warned:
            self._warned.add(said)
            log.warning("%s: %s", manifest.name, said)

    def _warn_of_lacking(self, report: ReloadReport) -> None:
        """Tell of replicas that serve nothing now: a reload cannot be taken back from those where it went well."""
        for replica in report.replicas:
            if replica.status != "reloaded":
                log.warning(
                    "%s %s, and serves nothing before it has %s: %s",
                    replica.replica, replica.status, report.name, replica.message,
                )  # fmt: skip

    def _retire(self) -> int | None:
        run, where = self._store.run, self._store.location
        try:
            return within(
                self._store_timeout_s, lambda _: self._retention.retire(), what=f"retiring old policies in {where}"
            )
        except PublishError as error:
            log.warning("policies of run %s that fell out of the window stay until the next one: %s", run, error)
            return None


def _policy(published: Published, report: LoadReport | ReloadReport, timings: Timings) -> Policy:
    manifest = published.manifest
    return Policy(
        name=manifest.name,
        version=manifest.version,
        step=manifest.step,
        digest=manifest.digest,
        path=published.path,
        timings=timings,
        report=report,
        alias=manifest.alias,
        served_as=(report.model or manifest.base_model) if isinstance(report, ReloadReport) else None,
    )
