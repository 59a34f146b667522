"""What one client has published, and what the training has discarded, as numbers for trackio, wandb and the like.

docs/metrics.md says what each means.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from proxy.errors import SettingsError
from trainer_client.policies import Policy, Timings

PREFIX = "lora_sync/"

_NOTHING_YET = Timings(gather=0.0, check=0.0, store=0.0, announce=0.0, retire=0.0)


class Metrics:
    """The counts of one client. Any thread may count and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._seconds = Counter[str]()
        self._newest: Policy | None = None
        self._newest_number = 0
        self._policies_live = 0

    def handed_over(self) -> int:
        """Count a publication that begins, and return its number, from 1."""
        with self._lock:
            self._counts["begun"] += 1
            return self._counts["begun"]

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Count whatever is raised within as a publication that has failed."""
        try:
            yield
        except BaseException:
            self.failed()
            raise

    def failed(self) -> None:
        """Count a publication that has failed."""
        with self._lock:
            self._counts["failures"] += 1

    def live(self, number: int, policy: Policy, *, policies_live: int | None) -> None:
        """Count one that has made its policy live. `policies_live` are the run's, None if the proxy did not tell."""
        with self._lock:
            self._counts["publications"] += 1
            self._seconds.update(asdict(policy.timings))
            self._newest, self._newest_number = policy, number
            if policies_live is not None:
                self._policies_live = policies_live

    def discarded(self, n: int, *, of: int) -> None:
        """Count `n` rollouts of `of` that were too stale. Raises SettingsError for numbers that cannot be."""
        if not 0 <= n <= of:
            raise SettingsError(f"{n} of {of} rollouts cannot have been discarded; give 0 <= n <= of.")
        with self._lock:
            self._counts.update(discarded=n, rollouts=of)

    def read(self) -> dict[str, float]:
        """Return every number by its name. All are there from the start, as 0."""
        with self._lock:
            counts, newest = self._counts, self._newest
            seconds = asdict(newest.timings if newest else _NOTHING_YET)
            numbers = {
                "current_version": newest.version if newest else 0,
                "current_step": newest.step if newest else 0,
                "staleness": counts["begun"] - self._newest_number,
                "policies_live": self._policies_live,
                "publications_total": counts["publications"],
                "failures_total": counts["failures"],
                **{f"{phase}_s": took for phase, took in seconds.items()},
                "publish_s": sum(seconds.values()),
                **{f"{phase}_s_total": self._seconds[phase] for phase in seconds},
                "publish_s_total": sum(self._seconds.values()),
                "rollouts_total": counts["rollouts"],
                "discarded_total": counts["discarded"],
                "discarded_share": counts["discarded"] / counts["rollouts"] if counts["rollouts"] else 0.0,
            }
        return {PREFIX + name: float(number) for name, number in numbers.items()}
