"""Discovery over any history: what is listed is in the fleet, and what people have decided stays decided."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from proxy.discovery.follow import Discovery, pause_s
from proxy.discovery.listing import Listing
from proxy.discovery.plan import plan
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Replica, ReplicaState
from proxy.metrics.lookups import LookupMetrics

URLS = ["http://a", "http://b", "http://c", "http://d"]
STATIC = "http://a"

Step = tuple[str, frozenset[str]]
subsets = st.frozensets(st.sampled_from(URLS))
steps = st.lists(st.tuples(st.sampled_from(["list", "fail", "add", "remove", "drained"]), subsets), max_size=12)


class Members:
    """Lets replicas in and out as the control plane does; a drain ends with `drained`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def add(self, url: str) -> Replica:
        return self.member(url) or self.fleet.add_replica(url)

    def remove(self, replica: Replica, why: str) -> None:
        assert why and self.member(replica.url) is replica
        self.fleet.set_state(replica, ReplicaState.DRAINING, why)

    def drained(self) -> None:
        for replica in [r for r in self.fleet.replicas if r.state is ReplicaState.DRAINING]:
            self.fleet.remove_replica(replica)

    def member(self, url: str) -> Replica | None:
        return next((r for r in self.fleet.replicas if r.url == url and r.state is not ReplicaState.DRAINING), None)

    @property
    def urls(self) -> set[str]:
        return {url for url in URLS if self.member(url)}


@given(steps)
def test_any_history(history: list[Step]) -> None:
    fleet = Fleet((STATIC,), clock=lambda: 0.0)
    members = Members(fleet)

    async def nothing() -> Listing:
        raise AssertionError

    discovery = Discovery(fleet, members, nothing, LookupMetrics(CollectorRegistry()), source="test", every_s=1)
    listed: frozenset[str] = frozenset()
    by_hand = {STATIC}  # what people have put into the fleet
    expected = {STATIC}
    for kind, urls in history:
        match kind:
            case "list":
                expected |= urls - listed
                by_hand &= expected
                expected -= (listed - urls) - by_hand
                listed = urls
                discovery._follow(Listing(dict.fromkeys(sorted(urls), "")))
            case "fail":
                discovery._failed("it is down")
            case "add":
                by_hand |= urls - expected
                expected |= urls
                for url in urls:
                    members.add(url)
            case "remove":
                expected -= urls
                by_hand -= urls
                for url in urls & members.urls:
                    replica = members.member(url)
                    assert replica is not None
                    members.remove(replica, "by hand")
            case _:
                members.drained()
        assert members.urls == expected
        assert len([r for r in fleet.replicas if r.state is not ReplicaState.DRAINING]) == len(expected)


@given(subsets, subsets, subsets, subsets)
def test_a_plan_moves_only_what_has_moved(
    listed: frozenset[str], before: frozenset[str], present: frozenset[str], ours: frozenset[str]
) -> None:
    moves = plan(sorted(listed), before=before, present=present, ours=sorted(ours & present))
    assert set(moves.add) == listed - before - present
    assert set(moves.remove) == (ours & present) - listed
    again = plan(sorted(listed), before=listed, present=present | set(moves.add), ours=[])
    assert again == ((), ())


@given(st.integers(0, 10_000), st.floats(0.01, 1000))
def test_a_source_that_fails_is_asked_less_often_but_soon_enough(failures: int, every_s: float) -> None:
    assert every_s <= pause_s(failures, every_s=every_s) <= max(every_s, 30)
    assert pause_s(0, every_s=every_s) == every_s
