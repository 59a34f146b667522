"""What the fleet knows anyway, read when Prometheus asks: gauges that nobody has to keep up to date."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.fleet.policies import OCCUPYING, Policy, PolicyState
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import ReplicaState
from proxy.metrics.families import by_replica
from proxy.metrics.rollouts import staleness_label
from proxy.routing.router import Router


class FleetState(Collector):
    """Reads a fleet and its router. Registers itself with `registry`."""

    def __init__(self, fleet: Fleet, router: Router, registry: CollectorRegistry) -> None:
        self._fleet = fleet
        self._router = router
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, those without a value too."""
        yield from self._replicas()
        yield from self._policies()
        yield from self._runs()
        yield from self._routing()
        pause = self._fleet.pause
        yield GaugeMetricFamily("lora_sync_pause_intended", "1 while a client's pause is on record", pause is not None)

    def _routing(self) -> Iterator[Metric]:
        router = self._router
        yield GaugeMetricFamily(
            "lora_sync_prefix_index_pieces", "Pieces of prompts that routing remembers", len(router.index)
        )
        yield CounterMetricFamily(
            "lora_sync_generated_tokens", "Tokens generated, as answers tell them", router.generated_tokens
        )
        for name, meaning, tokens in (
            ("prompt", "Prompt tokens sent to a replica, by estimate", router.prompt_tokens),
            ("cached", "Those that routing expected in its prefix cache", router.cached_tokens),
        ):
            yield by_replica(f"lora_sync_predicted_{name}_tokens", meaning, tokens)

    def _replicas(self) -> Iterator[Metric]:
        replicas, clock = self._fleet.replicas, self._fleet.clock
        info = GaugeMetricFamily("lora_sync_replica_info", "1 for each replica", labels=["replica", "url"])
        state = GaugeMetricFamily(
            "lora_sync_replica_state", "1 for the state that a replica is in, 0 for others", labels=["replica", "state"]
        )
        in_flight = GaugeMetricFamily("lora_sync_in_flight", "Rollouts in flight", labels=["replica"])
        load = GaugeMetricFamily(
            "lora_sync_load_tokens", "What these cost, in prompt tokens as routing counts", labels=["replica"]
        )
        held = GaugeMetricFamily("lora_sync_replica_policies", "Policies that a replica holds", labels=["replica"])
        paused = CounterMetricFamily(
            "lora_sync_paused_seconds", "Seconds for which a replica's engine was really paused", labels=["replica"]
        )
        joins = CounterMetricFamily("lora_sync_replica_joins", "Times that a replica became ready", labels=["replica"])
        for replica in replicas:
            label = [str(replica.index)]
            info.add_metric([*label, replica.url], 1)
            for possible in ReplicaState:
                state.add_metric([*label, possible], replica.state is possible)
            in_flight.add_metric(label, replica.inflight)
            load.add_metric(label, replica.load)
            held.add_metric(label, len(replica.held))
            lasting_s = 0.0 if replica.paused_since is None else clock() - replica.paused_since
            paused.add_metric(label, replica.paused_s + lasting_s)
            joins.add_metric(label, replica.joins)
        yield from (info, state, in_flight, load, held, paused, joins)

    def _policies(self) -> Iterator[Metric]:
        occupying = self._fleet.occupying()
        policies = GaugeMetricFamily("lora_sync_policies", "Policies that take a slot, by state", labels=["state"])
        states = Counter(policy.state for policy in occupying)
        for state in PolicyState:
            if state in OCCUPYING:
                policies.add_metric([state], states[state])
        yield policies
        blocked = sum(bool(policy.blocked) for policy in occupying)
        yield GaugeMetricFamily("lora_sync_policies_blocked", "Live policies that take no new rollouts", blocked)
        slots = self._fleet.slots()
        yield GaugeMetricFamily("lora_sync_policy_slots", "Smallest max_loras; absent if no replica tells", slots)
        leases: Counter[str] = Counter()
        for policy in self._fleet.policies.values():
            if policy.leases:
                leases[staleness_label(self._fleet.staleness(policy))] += policy.leases
        by_policy = GaugeMetricFamily(
            "lora_sync_policy_in_flight", "Rollouts of policies in flight, by staleness now", labels=["staleness"]
        )
        for label, count in leases.items():
            by_policy.add_metric([label], count)
        yield by_policy
        yield GaugeMetricFamily(
            "lora_sync_stalest_in_flight_versions", "Staleness of the stalest rollout in flight", self._stalest()
        )

    def _stalest(self) -> int:
        stale = (self._fleet.staleness(policy) for policy in self._fleet.policies.values() if policy.leases)
        return max((versions for versions in stale if versions is not None), default=0)

    def _runs(self) -> Iterator[Metric]:
        """The newest policy of each run that has one, as clients would see it."""
        version = GaugeMetricFamily("lora_sync_current_version", "Version of a run's newest policy", labels=["run"])
        step = GaugeMetricFamily(
            "lora_sync_current_step", "Optimizer step that it came from, where announced", labels=["run"]
        )
        age = GaugeMetricFamily("lora_sync_current_age_seconds", "Seconds since it was announced", labels=["run"])
        for run, policy in self._fleet.newest.items():
            if policy.state in OCCUPYING:
                _add(version, run, policy.version)
                _add(step, run, policy.step)
                _add(age, run, self._age_s(policy))
        yield from (version, step, age)

    def _age_s(self, policy: Policy) -> float:
        return self._fleet.clock() - policy.announced_at


def _add(family: GaugeMetricFamily, run: str | None, value: float | None) -> None:
    if value is not None:
        family.add_metric([run or ""], value)
