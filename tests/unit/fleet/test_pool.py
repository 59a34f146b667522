"""The fleet: leases come back, a policy appears all at once, and no replica is ready before it is whole."""

from __future__ import annotations

import tracemalloc

import pytest

from proxy.fleet.policies import Policy, PolicyState, slot_to_take
from proxy.fleet.pool import KEPT_RECORDS, Fleet
from proxy.fleet.replica import Facts, ReplicaState

FACTS = Facts(models=({"id": "base"},), max_loras=4)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    fleet = Fleet(("http://a", "http://b"), clock=clock)
    for replica in fleet.replicas:
        fleet.set_state(replica, ReplicaState.JOINING)
        fleet.admit(replica, FACTS)
    return fleet


def policy(name: str, state: PolicyState = PolicyState.LIVE, *, at: float = 0.0, named: float = 0.0) -> Policy:
    return Policy(name, name, f"/lora/{name}", None, None, None, announced_at=at, state=state, last_named_at=named)


def put(fleet: Fleet, name: str, *, held_by: tuple[int, ...] = (0, 1)) -> Policy:
    """Make a policy live on the given replicas."""
    made = policy(name, PolicyState.LOADING)
    fleet.add_policy(made)
    for index in held_by:
        fleet.replicas[index].held[name] = made.path
    fleet.commit(made)
    return made


def test_a_lease_is_given_back_once(fleet: Fleet) -> None:
    live = put(fleet, "p")
    lease = fleet.lease(0, live)
    assert (fleet.inflight, live.leases) == (1, 1)
    fleet.release(lease)
    fleet.release(lease)
    assert (fleet.inflight, live.leases) == (0, 0)
    assert "held=False" in repr(lease)


def test_a_policy_whose_leases_are_back_takes_no_memory_for_them(fleet: Fleet) -> None:
    """A long run ends hundreds of policies, each with thousands of rollouts, and their records are kept."""
    ended = [put(fleet, f"p{number}") for number in range(8)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for live in ended:
        for lease in [fleet.lease(0, live) for _ in range(5000)]:
            fleet.release(lease)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000


def test_a_loading_policy_is_not_served(fleet: Fleet) -> None:
    fleet.add_policy(policy("p", PolicyState.LOADING))
    assert fleet.served_policy("p") is None


def test_only_holders_are_candidates(fleet: Fleet) -> None:
    live = put(fleet, "p")
    fleet.replicas[1].held["p"] = "/another/path"
    assert [candidate.index for candidate in fleet.candidates(live)] == [0]
    assert [candidate.index for candidate in fleet.candidates(None)] == [0, 1]
    assert fleet.candidates(None, excluding=frozenset({0, 1})) == []


def test_a_commit_takes_out_who_lacks_the_policy(fleet: Fleet) -> None:
    put(fleet, "p", held_by=(0,))
    assert [replica.state for replica in fleet.replicas] == [ReplicaState.READY, ReplicaState.JOINING]


def test_a_replica_is_admitted_only_with_every_live_policy(fleet: Fleet) -> None:
    live = put(fleet, "p")
    replica = fleet.replicas[1]
    fleet.set_state(replica, ReplicaState.DOWN, "gone")
    assert replica.held == {}
    assert fleet.admit(replica, FACTS) == [live]
    fleet.set_state(replica, ReplicaState.JOINING)
    assert not replica.is_ready
    replica.held["p"] = live.path
    assert fleet.admit(replica, FACTS) == []
    assert replica.is_ready and replica.joins == 2


def test_health_waits_for_all_at_the_start_and_for_a_few_later(fleet: Fleet, clock: Clock) -> None:
    assert fleet.health(min_ready=1, start_wait_s=60) == (True, "")
    fleet.set_state(fleet.replicas[1], ReplicaState.DOWN, "it does not answer")
    healthy, why = fleet.health(min_ready=1, start_wait_s=60)
    assert not healthy and "http://b" in why and "does not answer" in why
    clock.now += 60
    assert fleet.health(min_ready=1, start_wait_s=60)[0]
    assert not fleet.health(min_ready=2, start_wait_s=60)[0]


def test_the_last_lease_of_a_retiring_policy_is_announced(fleet: Fleet) -> None:
    live = put(fleet, "p")
    lease = fleet.lease(0, live)
    fleet.set_policy_state(live, PolicyState.RETIRING)
    heard: list[int] = []
    fleet.on_change(lambda: heard.append(live.leases))
    fleet.release(lease)
    assert heard == [0]


def test_ended_policies_are_forgotten_in_the_end(fleet: Fleet) -> None:
    live = put(fleet, "kept")
    for number in range(KEPT_RECORDS + 50):
        fleet.add_policy(policy(f"old-{number}", PolicyState.RETIRED))
    assert len(fleet.policies) <= KEPT_RECORDS + 2 and live.name in fleet.policies


def test_a_retiring_policy_makes_room_first() -> None:
    policies = [policy("a", at=1), policy("b", PolicyState.RETIRING, at=3), policy("c", PolicyState.RETIRING, at=2)]
    victim = slot_to_take(policies, now=1000, idle_s=60)
    assert victim is not None and victim.name == "c"


def test_an_abandoned_policy_makes_room_but_never_the_newest() -> None:
    policies = [policy("a", at=1, named=50), policy("b", at=2, named=10), policy("c", at=3, named=3)]
    victim = slot_to_take(policies, now=1000, idle_s=60)
    assert victim is not None and victim.name == "b"
    assert slot_to_take(policies[2:], now=1000, idle_s=60) is None


def test_a_policy_in_use_keeps_its_slot() -> None:
    used, newest = policy("a", at=1, named=990), policy("b", at=2)
    assert slot_to_take([used, newest], now=1000, idle_s=60) is None
    used.last_named_at = 0.0
    Fleet(("http://a",), clock=Clock()).lease(0, used)
    used.last_named_at = 0.0
    assert slot_to_take([used, newest], now=1000, idle_s=60) is None


def test_a_replica_knows_what_its_rollouts_cost(fleet: Fleet) -> None:
    live = put(fleet, "p")
    leases = [fleet.lease(0, live, load=load) for load in (100, 30)]
    assert [candidate.load for candidate in fleet.candidates(live)] == [130, 0]
    for lease in [*leases, *leases]:
        fleet.release(lease)
    assert [candidate.load for candidate in fleet.candidates(live)] == [0, 0]


def test_an_emptied_cache_is_a_change(fleet: Fleet) -> None:
    heard: list[int] = []
    fleet.on_change(lambda: heard.append(fleet.replicas[0].cache_resets))
    fleet.cache_was_reset(fleet.replicas[0])
    assert heard == [1]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_the_policies_found_with_an_alias_the_newest_has_it(fleet: Fleet, order: tuple[int, int]) -> None:
    for version in order:
        found = policy(f"p-v{version}", PolicyState.LOADING)
        found.adopted, found.version, found.alias = True, version, "alias"
        fleet.add_policy(found)
        fleet.commit(found)
    newest = fleet.served_policy("alias")
    assert newest is not None
    assert newest.name == "p-v2"
    fleet.retire(newest, "unloaded", deadline=0.0)
    fleet.set_policy_state(newest, PolicyState.RETIRED)
    older = fleet.served_policy("p-v1")
    assert older is not None
    fleet.name_also(older, "alias")
    assert fleet.served_policy("alias") is older, "nobody has it any more"
