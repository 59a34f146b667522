"""What a replica needs, and what becomes of a policy: the transcript of every case."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.controlplane.plan import (
    ADOPTED_LATE_S,
    Adopt,
    Fate,
    Load,
    Unload,
    Verify,
    decide,
    disagreement,
    is_superseded,
    no_longer_loads,
    plan,
    surplus,
)
from proxy.fleet.policies import Policy, PolicyState
from proxy.fleet.replica import Replica, ReplicaState, Trial


def policy(name: str, state: PolicyState = PolicyState.LIVE, **fields: Any) -> Policy:
    return Policy(name, name, f"/lora/{name}", None, None, None, announced_at=0.0, state=state, **fields)


def replica(index: int = 0, state: ReplicaState = ReplicaState.READY, *, holds: str = "", **fields: Any) -> Replica:
    held = {name: f"/lora/{name}" for name in holds.split()}
    return Replica(index, f"http://{index}", state=state, held=held, **fields)


def by_name(*policies: Policy) -> dict[str, Policy]:
    return {policy.upstream: policy for policy in policies}


def test_every_state_of_a_policy() -> None:
    states = {"live": PolicyState.LIVE, "new": PolicyState.LIVE, "coming": PolicyState.LOADING}
    states |= {"going": PolicyState.RETIRING, "gone": PolicyState.RETIRED, "bad": PolicyState.FAILED}
    policies = {name: policy(name, state) for name, state in states.items()}
    it = replica(holds="live coming going gone bad stranger")
    actions = plan(policies, it, slots=None, now=0).actions
    assert actions == (Unload("gone"), Unload("bad"), Adopt("stranger", "/lora/stranger"), Load(policies["new"]))


@pytest.mark.parametrize("state", [ReplicaState.DOWN, ReplicaState.DRAINING, ReplicaState.QUARANTINED])
def test_nothing_is_done_to_a_replica_that_is_not_in_the_fleet(state: ReplicaState) -> None:
    assert plan(by_name(policy("p")), replica(state=state, holds="x"), slots=None, now=0).actions == ()


def test_the_right_name_from_the_wrong_path_is_replaced() -> None:
    wanted, it = policy("p"), replica()
    it.held = {"p": "/other"}
    assert plan(by_name(wanted), it, slots=1, now=0).actions[0] == Unload("p")
    it.held = {}
    assert plan(by_name(wanted), it, slots=1, now=0).actions == (Load(wanted),)


def test_a_load_waits_for_a_slot_and_for_its_time() -> None:
    wanted = policy("p")
    full = replica(holds="a b")
    policies = by_name(policy("a"), policy("b"), wanted)
    assert plan(policies, full, slots=2, now=0).actions == ()
    assert plan(policies, full, slots=3, now=0).actions == (Load(wanted),)
    full.trials["p"] = Trial(0, tries=1, outcome="late", retry_at=5.0)
    early = plan(policies, full, slots=3, now=4.0)
    assert (early.actions, early.look_again_at) == ((), 5.0)
    assert plan(policies, full, slots=3, now=5.0).actions == (Load(wanted),)


def test_a_call_without_an_answer_is_repeated_and_counts_as_a_slot() -> None:
    wanted, ended = policy("p"), policy("q", PolicyState.FAILED)
    it = replica(unsure={"p", "q"})
    assert plan(by_name(wanted, ended), it, slots=2, now=0).actions == (Unload("q"), Load(wanted))
    assert plan(by_name(policy("r"), wanted), it, slots=2, now=0).actions == (Load(wanted),)


def test_what_has_been_loaded_is_looked_at_before_the_next() -> None:
    wanted, other = policy("p", PolicyState.LOADING), policy("q", PolicyState.LOADING)
    it = replica(holds="p", trials={"p": Trial(0, tries=1, outcome="loaded")})
    assert plan(by_name(wanted, other), it, slots=None, now=0).actions == (Verify(wanted), Load(other))
    it.trials["p"].proven = True
    assert plan(by_name(wanted), it, slots=None, now=0).actions == ()


def test_what_a_replica_has_refused_is_not_asked_again_while_it_loads() -> None:
    refused = {"p": Trial(0, tries=1, outcome="refused", final=True)}
    assert plan(by_name(policy("p", PolicyState.LOADING)), replica(trials=refused), slots=None, now=9).actions == ()
    live = policy("p")
    assert plan(by_name(live), replica(trials=refused), slots=None, now=9).actions == (Load(live),), (
        "it may have healed"
    )


def test_the_scout_goes_first() -> None:
    wanted = policy("p", PolicyState.LOADING, scout=1)
    assert plan(by_name(wanted), replica(0), slots=None, now=0).actions == ()
    assert plan(by_name(wanted), replica(1), slots=None, now=0).actions == (Load(wanted),)


def test_a_policy_that_kills_engines_is_loaded_last() -> None:
    killer, good = policy("killer", blocked="it kills"), policy("good")
    assert plan(by_name(killer, good), replica(), slots=None, now=0).actions == (Load(good),)


def fate(wanted: Policy, *replicas: Replica, quorum: int | None = None, now: float = 0.0) -> Fate:
    return decide(wanted, replicas, quorum=quorum, now=now).fate


def test_when_a_load_is_complete() -> None:
    wanted = policy("p", PolicyState.LOADING, deadline=10)
    holder, other = replica(0, holds="p"), replica(1)
    assert fate(wanted, holder, other) is Fate.WAIT
    assert fate(wanted, holder, replica(1, ReplicaState.JOINING)) is Fate.COMMIT
    assert fate(wanted, holder, replica(1, ReplicaState.DOWN)) is Fate.COMMIT
    unproven = replica(1, holds="p", trials={"p": Trial(0, tries=1, outcome="loaded")})
    assert fate(wanted, holder, unproven) is Fate.WAIT
    assert fate(wanted, holder, replica(1, holds="p", unsure={"p"})) is Fate.WAIT


def test_when_a_load_has_failed() -> None:
    wanted = policy("p", PolicyState.LOADING, deadline=10)
    holder = replica(0, holds="p")
    late = replica(1, trials={"p": Trial(0, tries=7, outcome="late", message="No adapter found")})
    assert fate(wanted, holder, late, now=9.9) is Fate.WAIT
    decision = decide(wanted, [holder, late], quorum=None, now=10)
    assert decision.fate is Fate.FAIL
    assert "http://1 after 7 tries: No adapter found" in decision.why
    refusing = replica(1, trials={"p": Trial(0, tries=1, outcome="refused", message="no", final=True)})
    assert fate(wanted, holder, refusing) is Fate.FAIL
    assert fate(wanted, replica(0, ReplicaState.DOWN), replica(1, ReplicaState.JOINING)) is Fate.FAIL


def test_a_quorum_leaves_behind_only_what_is_late() -> None:
    wanted = policy("p", PolicyState.LOADING, deadline=10)
    holder, unasked = replica(0, holds="p"), replica(1)
    assert fate(wanted, holder, unasked, quorum=1) is Fate.WAIT
    late = replica(1, trials={"p": Trial(0, tries=1, outcome="late")})
    assert fate(wanted, holder, late, quorum=1) is Fate.COMMIT
    assert fate(wanted, holder, late, quorum=2) is Fate.WAIT
    silent = replica(1, unsure={"p"}, trials={"p": Trial(0, tries=1, outcome="unknown")})
    assert fate(wanted, holder, silent, quorum=1) is Fate.WAIT


def test_what_is_found_is_live_at_once_while_nobody_is_ready() -> None:
    found = policy("p", PolicyState.LOADING, adopted=True, deadline=10)
    joining = replica(0, ReplicaState.JOINING, holds="p")
    assert fate(found, joining) is Fate.COMMIT
    assert fate(found, joining, replica(1)) is Fate.WAIT, "others serve already: they load it first"


def test_an_adopted_policy_that_does_not_load_is_given_up() -> None:
    found = policy("p", adopted=True)
    trial = Trial(started_at=100, tries=3, outcome="late", message="No adapter found")
    it = replica(0, ReplicaState.JOINING, trials={"p": trial})
    assert no_longer_loads(found, [it], now=100 + ADOPTED_LATE_S - 0.1) is None
    assert "No adapter found" in (no_longer_loads(found, [it], now=100 + ADOPTED_LATE_S) or "")
    trial.outcome, trial.final = "refused", True
    assert no_longer_loads(found, [it], now=100) is not None
    assert no_longer_loads(policy("p"), [it], now=1e9) is None, "what was announced is waited for"


def test_of_too_many_adopted_ones_the_lowest_versions_go() -> None:
    found = [policy(f"p-v{version}", adopted=True) for version in (3, 1, 2)]
    for one in found:
        one.version = int(one.name[-1])
    announced = policy("q")
    assert surplus([*found, announced], slots=4) == []
    assert [one.name for one in surplus([*found, announced], slots=2)] == ["p-v1", "p-v2"]
    assert surplus([*found, announced], slots=None) == []


def test_the_highest_generation_of_a_name_counts() -> None:
    newer = Policy("p", "p~00000002", "/p", None, None, None, announced_at=0.0)
    assert is_superseded("p~00000001", newer)
    assert is_superseded("p", newer), "a bare name is older than any generation"
    assert not is_superseded("p~00000003", newer)
    newer.state = PolicyState.RETIRED
    assert is_superseded("p~00000001", newer), "an ended one leaves its name to nobody"
    assert not is_superseded("p~00000001", None)


def test_replicas_that_differ_are_named() -> None:
    wanted = policy("p")
    one, two = (replica(index, holds="p", trials={"p": Trial(0)}) for index in (0, 1))
    one.trials["p"].logprobs, two.trials["p"].logprobs = (-1.0, -2.0), (-1.1, -2.1)
    assert disagreement(wanted, [one, two]) is None
    two.trials["p"].logprobs = (-1.0, -4.0)
    assert "http://0 and http://1 differ by 1.00 nats" in (disagreement(wanted, [one, two]) or "")
    two.trials["p"].logprobs = ()
    assert disagreement(wanted, [one, two]) is None
