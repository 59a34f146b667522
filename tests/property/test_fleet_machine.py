"""Whatever happens to a fleet, in whatever order: promises P1 to P4 hold, and when the faults end everything settles.

A rule is one thing that happens outside the proxy; after it the real control plane runs, in virtual time, until nothing
more can happen at that moment. The promises are checked whenever the fleet says that it has changed, whenever a rollout
starts, and by the model replicas whenever a load arrives.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Literal, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.contract import Announcement, LoadReport, LoadRequest, managed_name
from proxy.errors import ApiError
from proxy.fleet.policies import OCCUPYING, WANTED, Policy, PolicyState
from proxy.fleet.pool import Lease
from proxy.fleet.replica import Replica, ReplicaState
from proxy.settings import ControlSettings
from tests.support.driven_fleet import DrivenFleet, digest_of
from tests.support.model_replica import Call, ModelReplica, Reply
from tests.support.virtual_time import VirtualTime

TRL_NAMES = ("trl-policy-v1", "trl-policy-v2", "trl-policy-v3")
"""Names that come again with other weights at the same path."""
RUN, ALIAS, HAND = "run", "newest", "by-hand"
MANAGED = tuple((version, content) for version in (1, 2) for content in (7, 8))
"""Versions and contents of policies whose names hold both."""

RESTART_S = 10.0
"""A restart of the proxy takes longer than what it had asked of replicas takes to be done."""
PACE_S = 1.0
"""Announcements follow each other so fast on average: else generations, which are seconds, run ahead of the clock, and
a restarted proxy could give one again."""
CALM_S = 200.0
"""Within so long without faults everything settles: a load's deadline, its rollback, and a minute between repairs."""

TIMEOUT_S = 3600
"""For the deep profile on a busy machine; the fast one takes 15 s."""
STEPS = 80
"""Things that happen in one example, at most."""

PICK = st.integers(0, 5)
"""Chooses one of however many there are."""
Item = TypeVar("Item")


class FleetMachine(RuleBasedStateMachine):
    """Trainers, rollout workers, people and bad luck, with one to four replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTime()
        self.files = {"/elsewhere": 1, f"/{HAND}": 2}
        self.servers: dict[str, ModelReplica] = {}
        self.proxy: DrivenFleet
        self.control: ControlSettings
        self.alarms: list[str] = []
        self.announcing: list[tuple[str, asyncio.Task[LoadReport]]] = []
        self.rollouts: list[Lease] = []
        self.given_up: set[str] = set()
        """Paths whose policies the client has unloaded."""
        self.announced: dict[tuple[str, str], int] = {}
        """(upstream name, path) -> the content that this name stands for."""
        self.overwritten: set[str] = set()
        """Upstream names whose files the client has replaced while they were in use: what loads then is its fault."""
        self.replaced: set[str] = set()
        """The same when nobody used them: a load that takes effect late, and is found after a restart, has new ones."""
        self.states: dict[int, ReplicaState] = {}
        """By a replica's serial, as last seen."""
        self.live: set[Policy] = set()

    @initialize(
        slots=st.lists(st.sampled_from([2, 2, 3, 4]), min_size=1, max_size=4),
        absent=st.booleans(),
        held=st.booleans(),
        sees=st.booleans(),
        quorum=st.sampled_from([None, None, 1, 2]),
        verify=st.sampled_from(["probe", "list", "off"]),
    )
    def start(
        self,
        slots: list[int],
        absent: bool,
        held: bool,
        sees: bool,
        quorum: int | None,
        verify: Literal["probe", "list", "off"],
    ) -> None:
        for number, max_loras in enumerate(slots):
            url = f"http://replica{number}"
            server = ModelReplica(
                url, max_loras=max_loras, files=self.files, alarm=self.alarms.append, on_unload=self.unloading
            )
            self.servers[url] = server
        self.control = ControlSettings(
            lora_load_timeout_s=20, call_timeout_s=10, unload_wait_s=10, policy_idle_s=5, load_quorum=quorum,
            verify=verify, stall_s=4, call_stall_s=8, drain_timeout_s=10,
        )  # fmt: skip
        self.sees = sees
        if absent:
            server.die()  # the last one is not there yet
        self.serve(tuple(self.servers))
        for server in self.servers.values():
            server.held = held

    def serve(self, urls: tuple[str, ...]) -> None:
        self.proxy = DrivenFleet(self.loop, self.servers, urls, self.control, files=self.files, sees=self.sees)
        self.states, self.live = {}, set()
        self.proxy.fleet.on_change(self.watch)
        self.run()

    def run(self, seconds: float = 0.0) -> None:
        """Let the proxy do all that it can do now, or in so many seconds."""
        self.loop.advance(seconds)
        if self.proxy.running.done():
            self.proxy.running.result()
        for _, task in self.announcing:
            if task.done() and not task.cancelled() and not isinstance(task.exception(), ApiError | None):
                task.result()
        self.announcing = [(name, task) for name, task in self.announcing if not task.done()]

    # Clients

    @rule(name=st.sampled_from(TRL_NAMES), content=st.integers(1, 2))
    def announce(self, name: str, content: int) -> None:
        """As TRL does: write the files, then say so."""
        self.write(f"/trl/{name}", content, name)
        self.ask(LoadRequest(lora_name=name, lora_path=f"/trl/{name}"))

    @rule(what=st.sampled_from(MANAGED), alias=st.sampled_from([None, ALIAS]))
    def announce_managed(self, what: tuple[int, int], alias: str | None) -> None:
        version, content = what
        digest = digest_of(content)
        name = managed_name(RUN, version, digest)
        self.write(f"/store/{name}", content, name)
        announced = Announcement(run=RUN, version=version, step=version, digest=digest, alias=alias)
        self.ask(LoadRequest(lora_name=name, lora_path=f"/store/{name}", policy=announced))

    @rule(version=st.integers(1, 3), content=st.integers(1, 2), seconds=st.sampled_from([0.0, 3.0]))
    def sync(self, version: int, content: int, seconds: float) -> None:
        """One whole sync as TRL does it: the new version, then the unload of the one before the last."""
        self.announce(TRL_NAMES[version - 1], content)
        self.run(seconds)
        self.unload_named(TRL_NAMES[version % 3])

    def write(self, path: str, content: int, name: str) -> None:
        self.given_up.discard(path)
        fleet = self.proxy.fleet
        waits = any(other == name for other, _ in self.announcing)
        for (upstream, known), before in self.announced.items():
            policy = fleet.policies.get(upstream)
            used = policy is None or (policy.state in WANTED and (policy.leases or policy.callers or waits))
            if known == path and before != content:
                (self.overwritten if used else self.replaced).add(upstream)
        self.files[path] = content

    def ask(self, request: LoadRequest) -> None:
        self.announcing.append((request.lora_name, self.loop.create_task(self.proxy.loading.load(request))))
        self.run(PACE_S)

    @precondition(lambda self: self.announcing)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        """The client that announced goes away."""
        one_of(self.announcing, pick)[1].cancel()
        self.run()

    @precondition(lambda self: self.proxy.fleet.named)
    @rule(what=PICK)
    def unload(self, what: int) -> None:
        self.unload_named(one_of(list(self.proxy.fleet.named), what))

    def unload_named(self, name: str) -> None:
        """As `api.unload` does for a client."""
        fleet = self.proxy.fleet
        policy = fleet.named.get(name)
        if policy is None or policy.state not in OCCUPYING:
            return
        if name != policy.name:
            del fleet.named[name]
        else:
            if not policy.adopted:
                self.given_up.add(policy.path)
            fleet.retire(policy, "unloaded", deadline=fleet.clock() + self.control.unload_wait_s)
        self.run()

    @precondition(lambda self: self.given_up)
    @rule(pick=PICK)
    def delete_files(self, pick: int) -> None:
        """As TRL does some time after the unload."""
        path = one_of(sorted(self.given_up), pick)
        self.given_up.discard(path)
        self.files.pop(path, None)

    # Rollouts

    @precondition(lambda self: self.proxy.fleet.named)
    @rule(what=PICK, pick=PICK)
    def start_rollout(self, what: int, pick: int) -> None:
        """As `relay` does: it goes where the fleet says that it may, and whoever fails it is suspected."""
        fleet = self.proxy.fleet
        policy = fleet.served_policy(one_of(list(fleet.named), what))
        if policy is None or policy.blocked or not (candidates := fleet.candidates(policy)):
            return
        index = one_of(candidates, pick).index
        replica = next(replica for replica in fleet.replicas if replica.index == index)
        server = self.servers[replica.url]
        adapter = server.generate(policy.upstream) if server.alive else None
        if adapter is None:
            if not server.alive or policy.state is PolicyState.LIVE:
                fleet.suspect(replica, "a rollout found it unfit")
            self.run()
            return
        self.rollouts.append(fleet.lease(index, policy, client=("worker", 1)))
        stands_for = self.announced.get((policy.upstream, policy.path), adapter.content)
        if policy.upstream in self.overwritten or (adapter.by_hand and server.unseen):
            return
        if (adapter.path, adapter.content) != (policy.path, stands_for):
            self.alarms.append(f"P1: {server.url} serves {adapter} as {policy}, which stands for {stands_for}")
        if server.kv[policy.upstream, policy.path] != stands_for:
            self.alarms.append(f"P1: the KV of {policy} on {server.url} is of other weights")

    @precondition(lambda self: self.rollouts)
    @rule(pick=PICK)
    def finish_rollout(self, pick: int) -> None:
        lease = one_of(self.rollouts, pick)
        self.rollouts.remove(lease)
        self.proxy.fleet.release(lease)
        self.run()

    @precondition(lambda self: self.rollouts)
    @rule(pick=PICK)
    def block(self, pick: int) -> None:
        """Two engines have died under rollouts of one policy."""
        policy = one_of(self.rollouts, pick).policy
        assert policy is not None
        self.proxy.fleet.block(policy, "it has killed two engines")
        self.run()

    # Replicas

    def server(self, pick: int) -> ModelReplica:
        return one_of(list(self.servers.values()), pick)

    @rule(pick=PICK, how=st.sampled_from(Reply), times=st.integers(1, 3))
    def will_reply(self, pick: int, how: Reply, times: int) -> None:
        """The next loads or unloads on a replica will be treated like this."""
        self.server(pick).script.extend([how] * times)

    @rule(pick=PICK, what=st.sampled_from(["held", "blind", "slow", "spoils"]), on=st.booleans())
    def switch(self, pick: int, what: str, on: bool) -> None:
        """From now on a replica's calls wait for `reply`, or it sees no files, lists late, or shows NaN; or no more."""
        server = self.server(pick)
        setattr(server, what, on)
        server.answer_lists()
        self.run()

    def waiting(self) -> list[tuple[ModelReplica, Call]]:
        return [(server, call) for server in self.servers.values() for call in server.queue if not server.hung]

    @precondition(lambda self: self.waiting())
    @rule(pick=PICK, how=st.sampled_from([*Reply, Reply.DONE, Reply.DONE]))
    def reply(self, pick: int, how: Reply) -> None:
        """Treat one call that waits."""
        server, call = one_of(self.waiting(), pick)
        server.reply(call, how)
        self.run()

    @precondition(lambda self: any(call.answer.done() for _, call in self.waiting()))
    @rule()
    def do_given_up(self) -> None:
        """What replicas were asked by calls that have been given up takes effect."""
        for server in {server.url: server for server, _ in self.waiting()}.values():
            server.do_given_up()

    @rule(pick=PICK, comes_back=st.booleans())
    def die(self, pick: int, comes_back: bool) -> None:
        """A server ends, and its rollouts with it; perhaps it is back, empty, before anybody has looked."""
        server = self.server(pick)
        server.restart() if comes_back else server.die()
        for lease in [lease for lease in self.rollouts if lease.replica.url == server.url]:
            self.rollouts.remove(lease)
            self.proxy.fleet.release(lease)
            if lease.replica in self.proxy.fleet.replicas:
                self.proxy.fleet.suspect(lease.replica, "a rollout lost its connection")
        self.run()

    @rule(pick=PICK, seconds=st.sampled_from([1.0, 5.0, 15.0, math.inf]))
    def hang(self, pick: int, seconds: float) -> None:
        """An engine stops, for a while or for good: only what needs the engine shows it."""
        server = self.server(pick)
        server.hung = server.alive
        if seconds < math.inf:
            self.run(seconds)
            server.hung = False
        self.run()

    @rule(pick=PICK)
    def suspect(self, pick: int) -> None:
        """A rollout found a replica unfit."""
        replica = one_of(self.proxy.fleet.replicas, pick)
        self.proxy.fleet.suspect(replica, "a rollout lost its connection")
        self.run()

    @rule(pick=PICK, how=st.sampled_from(["unload", "load", "load under a client's name", "load from elsewhere"]))
    def meddle(self, pick: int, how: str) -> None:
        """Somebody else loads or unloads adapters on a replica."""
        server = self.server(pick)
        upstreams = sorted(policy.upstream for policy in self.proxy.fleet.occupying())
        if not server.alive:
            return
        if how == "unload" and server.adapters:
            server.unload_by_hand(one_of(list(server.adapters), pick // 2))
        elif how == "load":
            server.load_by_hand(HAND, f"/{HAND}")
        elif how == "load under a client's name":
            server.load_by_hand(TRL_NAMES[0], f"/{HAND}")
        elif how == "load from elsewhere" and upstreams:
            server.unload_by_hand(name := one_of(upstreams, pick // 2))
            server.load_by_hand(name, "/elsewhere")

    @precondition(lambda self: len(self.proxy.fleet.replicas) > 1)
    @rule(pick=PICK)
    def remove(self, pick: int) -> None:
        self.proxy.members.remove(one_of(self.proxy.fleet.replicas, pick))
        self.run()

    @precondition(lambda self: len(self.proxy.fleet.replicas) < len(self.servers))
    @rule()
    def add(self) -> None:
        """Take all removed replicas in again, as they are."""
        for url, server in self.servers.items():
            if url not in {replica.url for replica in self.proxy.fleet.replicas}:
                server.do_given_up()
                self.proxy.members.add(url)
        self.run()

    # Time, and the proxy

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 2.0, 6.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.run(seconds)

    @rule()
    def restart_proxy(self) -> None:
        """The proxy ends with all that it knew; what it had asked is done before the next one has started.

        The next one adopts what replicas hold, and loads it where it is missing. Of files replaced since their
        announcement it cannot know.
        """
        self.stop()
        self.overwritten |= self.replaced
        for server in self.servers.values():
            server.do_given_up()
        self.loop.advance(RESTART_S)
        self.serve(tuple(self.servers))

    def stop(self) -> None:
        tasks = [self.proxy.running, *(task for _, task in self.announcing)]
        for task in tasks:
            task.cancel()
        self.loop.advance()
        assert all(task.done() for task in tasks), "a task of the proxy's does not end"
        self.announcing.clear()
        self.rollouts.clear()

    # Promises

    def watch(self) -> None:
        """Look at the fleet at every change of it."""
        fleet = self.proxy.fleet
        for policy in fleet.policies.values():
            if not policy.adopted and policy.path in self.files:
                self.announced.setdefault((policy.upstream, policy.path), self.files[policy.path])
        for replica in fleet.replicas:
            before = self.states.get(replica.serial, ReplicaState.DOWN)
            self.states[replica.serial] = replica.state
            if replica.is_ready and before is not ReplicaState.READY:
                self.became_ready(replica, before)
        live = set(fleet.live())
        for policy in live - self.live:
            self.became_live(policy)
        self.live = live

    def became_ready(self, replica: Replica, before: ReplicaState) -> None:
        if before is not ReplicaState.JOINING:
            self.alarms.append(f"P3: {replica} was {before} before")
        for policy in self.proxy.fleet.policies.values():
            if policy.state in WANTED and not policy.blocked:
                self.holds(replica, policy, "P3: is ready")

    def became_live(self, policy: Policy) -> None:
        ready, quorum = self.proxy.fleet.ready, self.control.load_quorum
        for replica in ready:
            self.holds(replica, policy, "P2: is ready while the policy becomes live")
        left_behind = [
            r for r in self.proxy.fleet.replicas if r.reason.startswith(f"lacks {policy.name}, which is live")
        ]
        if left_behind and (quorum is None or len(ready) < quorum):
            self.alarms.append(f"P2: {policy} becomes live, and leaves {left_behind} behind")

    def holds(self, replica: Replica, policy: Policy, what: str) -> None:
        server = self.servers[replica.url]
        if not replica.has_proven(policy):
            self.alarms.append(f"{what}: {replica} has not proven {policy}")
        adapter = server.adapters.get(policy.upstream)
        if (adapter is None or adapter.path != policy.path) and not server.unseen:
            self.alarms.append(f"{what}: {server} does not hold {policy}")

    def unloading(self, server: ModelReplica, upstream: str) -> None:
        """An unload has arrived: nothing may be pulled from under a rollout before its time."""
        fleet = self.proxy.fleet
        policy = fleet.policies[upstream]
        replica = next(replica for replica in fleet.replicas if replica.url == server.url)
        used = any(lease.replica is replica for lease in policy.leased) and replica.holds(policy)
        if used and (policy.state in WANTED or fleet.clock() < policy.deadline):
            self.alarms.append(f"P4: {server.url} is to unload {policy} while rollouts use it")

    @invariant()
    def promises_hold(self) -> None:
        assert not self.alarms, "\n".join(self.alarms)

    def teardown(self) -> None:
        if hasattr(self, "proxy"):
            try:
                if not self.alarms and not self.proxy.running.done():
                    self.everything_settles()
            finally:
                self.stop()
        self.loop.close()

    def everything_settles(self) -> None:
        """No fault, no rollout: every load ends, every unload is done, every replica serves."""
        for lease in self.rollouts:
            self.proxy.fleet.release(lease)
        self.rollouts.clear()
        for server in self.servers.values():
            server.recover()
        self.run(CALM_S)
        fleet = self.proxy.fleet
        self.promises_hold()
        assert not self.announcing, f"{self.announcing} wait still"
        assert {policy.state for policy in fleet.occupying()} <= {PolicyState.LIVE}, fleet.occupying()
        assert not fleet.leaving() and not any(replica.unsure for replica in fleet.replicas), fleet.replicas
        live = {policy.upstream: policy.path for policy in fleet.live()}
        for replica in fleet.replicas:
            server = self.servers[replica.url]
            held = {name: adapter.path for name, adapter in server.adapters.items()}
            if len(live) > server.max_loras:
                assert replica.state is ReplicaState.JOINING and "lacks" in replica.reason, (replica, replica.reason)
                assert held.items() <= live.items(), (held, live)
            else:
                assert replica.is_ready, (replica, replica.reason)
                assert held == live, (server, held, live)


def one_of(items: list[Item] | tuple[Item, ...], pick: int) -> Item:
    return items[pick % len(items)]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of examples say a lot; a failing one is told by its steps."""
    caplog.set_level(logging.CRITICAL, logger="proxy")


FleetMachine.TestCase.settings = settings(deadline=None, stateful_step_count=STEPS)
TestFleetMachine = pytest.mark.timeout(TIMEOUT_S)(FleetMachine.TestCase)
