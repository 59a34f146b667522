"""The loop behind `up`: look at the Jobs, plan, act, until it is over; then cancel everything, whatever happened.

Nothing depends on an answer of `run_job` having arrived: what runs is what the Hub lists under the run's label.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from trainer_client.errors import HubSilentError, JobsError
from trainer_client.jobs.config import FleetConfig
from trainer_client.jobs.ending import Ended, cancel_all
from trainer_client.jobs.health import HEALTHY, HealthProbe
from trainer_client.jobs.hub import Hub
from trainer_client.jobs.launch import Role, Run, Seat, job_call
from trainer_client.jobs.plan import Action, Cancel, End, Seen, Start, Wanted, plan, started
from trainer_client.jobs.screen import Row, Screen
from trainer_client.jobs.seen import Job

UNANSWERED_S = 15.0
"""How long a start that got no answer may take to turn up in the Hub's list before it is sent again."""

_AT_ONCE = 8
"""Jobs started at the same time."""


class Watch:
    """One `up`, from the first Job to the last. `run()` once."""

    def __init__(self, hub: Hub, config: FleetConfig, run: Run, *, secrets: Mapping[str, str], screen: Screen) -> None:
        self._hub = hub
        self._config = config
        self._run = run
        self._secrets = secrets
        self._screen = screen
        self._wanted = Wanted(config.replicas.count, config.replicas.start_timeout)
        self._jobs: dict[str, Job] = {}
        self._listed: set[str] = set()
        self._health: dict[str, str] = {}
        self._well_at: dict[str, float] = {}
        self._proven: set[str] = set()
        self._replaced: set[str] = set()
        self._sent_at: dict[Seat, float] = {}
        self._refusals: dict[Seat, int] = {}
        self._silent = False

    def run(self, stop: threading.Event) -> tuple[End, Ended]:
        """Bring the fleet up and keep it up until the trainer ends, something cannot work, or `stop` is set.

        Every Job is canceled before this returns, or raises what nobody expects. Returns how it went, and what came of
        canceling.
        """
        with HealthProbe() as probe, ThreadPoolExecutor(_AT_ONCE) as threads:
            try:
                end = self._until_end(stop, probe, threads)
            except JobsError as error:
                end = End(False, str(error))
            except BaseException:
                self._cancel_all()
                raise
            return end, self._cancel_all()

    def _until_end(self, stop: threading.Event, probe: HealthProbe, threads: ThreadPoolExecutor) -> End:
        while not stop.is_set():
            self._look(probe)
            for action in (actions := plan(self._wanted, self._seen())):
                if isinstance(action, End):
                    self._show()
                    return action
            self._act(actions, threads)
            self._show()
            stop.wait(self._config.poll)
        return End(False, "stopped by a signal")

    def _look(self, probe: HealthProbe) -> None:
        try:
            now_listed = {job.id: job for job in self._hub.jobs(self._run.labels())}
        except JobsError as error:
            # Also a refusal: a training is not given up for one odd answer.
            if not self._silent:
                self._screen.say(f"{error}; nothing is changed until it lists them")
            self._silent = True
        else:
            self._silent = False
            for gone in self._listed - now_listed.keys():
                self._jobs[gone] = replace(self._jobs[gone], stage="DELETED")
            self._jobs |= now_listed
            self._listed = set(now_listed)
        self._settle()
        replicas = [job for job in self._jobs.values() if job.alive and job.seat.role is Role.REPLICA]
        self._health = probe.ask(replicas)
        now = time.monotonic()
        for job in replicas:
            self._well_at.setdefault(job.id, now)
            if self._health[job.id] == HEALTHY:
                self._well_at[job.id] = now
                self._proven.add(job.id)

    def _settle(self) -> None:
        """Find out what became of starts that got no answer."""
        now = time.monotonic()
        for seat, sent_at in list(self._sent_at.items()):
            if any(job.alive and job.seat == seat for job in self._jobs.values()):
                del self._sent_at[seat]
                self._refusals.pop(seat, None)
            elif now - sent_at > UNANSWERED_S and not self._silent:
                del self._sent_at[seat]
                self._refusals[seat] = self._refusals.get(seat, 0) + 1

    def _seen(self) -> Seen:
        now = time.monotonic()
        return Seen(
            jobs=tuple(self._jobs.values()),
            unwell_s={
                job_id: 0.0 if health == HEALTHY else max(now - self._well_at[job_id], 0.001)
                for job_id, health in self._health.items()
            },
            proven=frozenset(self._proven),
            replaced=frozenset(self._replaced),
            unanswered=frozenset(self._sent_at),
            refusals=self._refusals,
        )

    def _act(self, actions: list[Action], threads: ThreadPoolExecutor) -> None:
        for action in actions:
            if isinstance(action, Cancel):
                self._cancel(action)
        starts = [action for action in actions if isinstance(action, Start)]
        if starts and not self._silent:  # else a Job that is not seen may hold the seat already
            self._start_all(starts, threads)

    def _start_all(self, starts: list[Start], threads: ThreadPoolExecutor) -> None:
        may_fail = started(self._seen())
        for start in starts:
            self._screen.say(f"starting {start.seat}{f': {start.why}' * bool(start.why)}")
            # Before it is sent: should this be interrupted, the end looks for it.
            self._sent_at[start.seat] = time.monotonic()
        outcomes = list(threads.map(self._start, starts))
        for start, outcome in zip(starts, outcomes, strict=True):
            self._note(start.seat, outcome)
        refused = [outcome for outcome in outcomes if isinstance(outcome, JobsError)]
        for error in refused:
            if not may_fail and not isinstance(error, HubSilentError):
                raise error
            self._screen.say(str(error))

    def _note(self, seat: Seat, outcome: Job | JobsError) -> None:
        if isinstance(outcome, HubSilentError):
            return  # `_settle` finds out
        del self._sent_at[seat]
        if isinstance(outcome, Job):
            self._jobs[outcome.id] = outcome
            self._refusals.pop(seat, None)
        else:
            self._refusals[seat] = self._refusals.get(seat, 0) + 1

    def _start(self, start: Start) -> Job | JobsError:
        try:
            return self._hub.run(job_call(self._config, self._run, start.seat), self._secrets)
        except JobsError as error:
            return error

    def _cancel(self, action: Cancel) -> None:
        self._replaced.add(action.job.id)
        self._screen.say(f"canceling {action.job}: {action.why}")
        try:
            self._hub.cancel(action.job)
        except JobsError as error:
            self._screen.say(str(error))

    def _show(self) -> None:
        jobs = sorted(self._jobs.values(), key=lambda job: (job.seat.role, job.seat.number, job.created))
        self._screen.show(Row.of(job, self._health.get(job.id, "")) for job in jobs)

    def _cancel_all(self) -> Ended:
        known = [job for job in self._jobs.values() if job.alive]
        late = self._sent_at or any(job.id not in self._listed for job in known)
        return cancel_all(
            self._hub,
            self._run.labels(),
            known=known,
            say=self._screen.say,
            at_least_s=UNANSWERED_S if late else 0.0,
        )
