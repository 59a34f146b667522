"""One publication from the moment in which its bytes are copied: into the store, to the proxy, and old ones away."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from proxy.contract import LoadReport, LoadRequest
from trainer_client.adapters import Payload
from trainer_client.deadlines import within
from trainer_client.errors import ProxyError, PublishError
from trainer_client.policies import Policy, Timings
from trainer_client.progress import Progress, Tell, tell_nobody
from trainer_client.proxy_api import ProxyApi
from trainer_client.publisher import Published, Terms, publish_files
from trainer_client.retention import Retention
from trainer_client.stores.policy_store import PolicyStore

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
        self._max_lora_rank: int | None = None

    def carry_out(self, payload: Payload, terms: Terms, *, gather_s: float) -> tuple[Policy, int | None]:
        """Publish, announce and retire. Return the policy, and how many of the run are live, None if that is unknown.

        Raises a PublishError. Trouble with retiring is no failure, since the policy is live: it is logged.
        """
        rank = self._fleets_rank()
        published = within(
            self._store_timeout_s,
            lambda deadline: publish_files(
                payload, terms, store=self._store, max_lora_rank=rank, deadline=deadline, tell=self._tell
            ),
            what=f"writing step {terms.step} into {self._store.location}",
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

    def _fleets_rank(self) -> int | None:
        """Ask once. A proxy that does not answer now is waited for by the announcement, and checks the rank as well."""
        if self._max_lora_rank is None:
            with suppress(ProxyError):
                self._max_lora_rank = self._proxy.max_lora_rank()
        return self._max_lora_rank

    def _announce(self, published: Published) -> LoadReport:
        manifest = published.manifest
        report = self._proxy.load(
            LoadRequest(lora_name=manifest.name, lora_path=str(published.path), policy=manifest.announcement())
        )
        for warning in report.warnings:
            log.warning("%s: %s", self._proxy.url, warning)
        return report

    def _retire(self) -> int | None:
        run, where = self._store.run, self._store.location
        try:
            return within(
                self._store_timeout_s, lambda _: self._retention.retire(), what=f"retiring old policies in {where}"
            )
        except PublishError as error:
            log.warning("policies of run %s that fell out of the window stay until the next one: %s", run, error)
            return None


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
        alias=manifest.alias,
    )
