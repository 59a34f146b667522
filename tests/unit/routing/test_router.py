"""The router as the relay uses it: bursts stay together, groups spread, turns return, what is gone is forgotten."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from msgspec import structs

from proxy.fleet.policies import Policy
from proxy.fleet.pool import Fleet
from proxy.fleet.replica import Facts, ReplicaState
from proxy.routing.choose import Choice, Route
from proxy.routing.request_key import RequestKey, read_request
from proxy.routing.router import Router

FACTS = Facts(models=({"id": "base"},), instance_id="first life")


class World:
    """A fleet, its router, and rollouts that stay in flight."""

    def __init__(self, replicas: int, *, facts: Facts = FACTS, routing: str = "cost") -> None:
        self.fleet = Fleet(tuple(f"http://{number}" for number in range(replicas)), clock=lambda: 0.0)
        self.router = Router(max_tracked_blocks=100_000, routing=routing)
        self.fleet.on_change(lambda: self.router.follow(self.fleet))
        for replica in self.fleet.replicas:
            self.fleet.set_state(replica, ReplicaState.JOINING)
            self.fleet.admit(replica, facts)

    def send(self, key: RequestKey) -> Choice:
        choice = self.router.choose(key, self.fleet.candidates(None))
        self.fleet.lease(choice.replica, None, load=choice.load)
        return choice


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


def key(prompt: object, *, model: str = "base", session: bytes = b"") -> RequestKey:
    return read_request(json.dumps({"model": model, "prompt": prompt, "max_tokens": 256}).encode(), session=session)


@pytest.mark.parametrize("order", ["grouped", "shuffled", "interleaved"])
@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.parametrize("template", [0.0, 0.2, 0.6, 0.9])
def test_a_burst_of_groups_spreads_and_each_group_stays_together(template: float, replicas: int, order: str) -> None:
    rng = random.Random(3)
    shared = tokens(rng, int(1000 * template))
    prompts = [key(shared + tokens(rng, 1000 - len(shared))) for _ in range(24)]
    arrivals = [group for group in range(24) for _ in range(8)]
    if order == "shuffled":
        rng.shuffle(arrivals)
    elif order == "interleaved":
        arrivals = [group for _ in range(8) for group in range(24)]
    world, homes, load = World(replicas), defaultdict(set), Counter[int]()
    for group in arrivals:
        choice = world.send(prompts[group])
        homes[group].add(choice.replica)
        load[choice.replica] += 1
    assert max(load.values()) / (192 / replicas) <= 1.10
    assert sum(map(len, homes.values())) / 24 <= 1.05
    assert world.router.counts == {Route.UNMATCHED: 24, Route.AFFINITY: 168}


@pytest.mark.parametrize("size", [2, 4, 16, 32])
def test_groups_of_any_size_stay_together_and_spread(size: int) -> None:
    rng = random.Random(size)
    prompts = [key(tokens(rng, 600)) for _ in range(24)]
    arrivals = [group for group in range(24) for _ in range(size)]
    rng.shuffle(arrivals)
    world, homes = World(3), defaultdict(set)
    for group in arrivals:
        homes[group].add(world.send(prompts[group]).replica)
    assert sum(map(len, homes.values())) / 24 <= 1.05
    assert max(replica.inflight for replica in world.fleet.replicas) <= 1.15 * 24 * size / 3


def test_one_large_group_does_not_fill_one_replica_while_others_idle() -> None:
    world = World(3)
    prompt = key(tokens(random.Random(13), 500))
    for _ in range(192):
        world.send(prompt)
    assert max(replica.inflight for replica in world.fleet.replicas) <= 1.10 * 64


def test_a_later_turn_goes_where_the_earlier_one_ran() -> None:
    rng = random.Random(4)
    world, system = World(3), tokens(rng, 300)
    prompts = [system + tokens(rng, 300) for _ in range(12)]
    homes = [world.send(key(prompt)).replica for prompt in prompts]
    assert set(homes) == {0, 1, 2}
    for _ in range(3):
        for number, prompt in enumerate(prompts):
            prompt += tokens(rng, 200)
            choice = world.send(key(prompt))
            assert (choice.replica, choice.route) == (homes[number], Route.AFFINITY)


def test_chat_turns_follow_each_other_too() -> None:
    world = World(2)
    messages = [{"role": "system", "content": "s" * 500}, {"role": "user", "content": "u" * 500}]
    body = {"model": "base", "messages": messages}
    first = world.send(read_request(json.dumps(body).encode()))
    messages += [{"role": "assistant", "content": "a" * 300}, {"role": "user", "content": "v" * 300}]
    second = world.send(read_request(json.dumps(body).encode()))
    assert (second.replica, second.route) == (first.replica, Route.AFFINITY)


def test_a_session_breaks_a_tie() -> None:
    rng = random.Random(5)
    world = World(4)
    first = world.send(key(tokens(rng, 100), session=b"s1")).replica
    for _ in range(3):
        world.send(key(tokens(rng, 100)))
    assert world.send(key(tokens(rng, 100), session=b"s1")).replica == first


def test_a_replica_that_restarted_attracts_nothing() -> None:
    world = World(2)
    prompt = key(tokens(random.Random(6), 500))
    home = world.fleet.replicas[world.send(prompt).replica]
    world.fleet.set_state(home, ReplicaState.DOWN, "gone")
    world.fleet.set_state(home, ReplicaState.JOINING)
    world.fleet.admit(home, FACTS)
    assert world.router.choose(prompt, world.fleet.candidates(None)).route is Route.AFFINITY, "the same process"
    world.fleet.set_state(home, ReplicaState.DOWN, "gone")
    world.fleet.set_state(home, ReplicaState.JOINING)
    world.fleet.admit(home, replace(FACTS, instance_id="second life"))
    assert world.send(prompt).route is Route.UNMATCHED


def test_an_emptied_cache_attracts_nothing() -> None:
    world = World(2)
    prompt = key(tokens(random.Random(6), 500))
    home = world.fleet.replicas[world.send(prompt).replica]
    world.fleet.cache_was_reset(home)
    assert len(world.router.index) == 0
    assert world.send(prompt).route is Route.UNMATCHED


def test_what_a_cache_should_have_found_is_counted_until_it_is_emptied() -> None:
    world = World(1)
    prompt = key(tokens(random.Random(1), 1000))
    for _ in range(4):
        world.send(prompt)
    assert world.router.prompt_tokens == {0: 4 * prompt.prompt_tokens}
    assert world.router.cached_tokens[0] == pytest.approx(3 * prompt.prompt_tokens, rel=0.02)
    world.fleet.cache_was_reset(world.fleet.replicas[0])
    assert world.router.prompt_tokens.total() == world.router.cached_tokens.total() == 0


def test_a_retired_policy_is_forgotten_whole() -> None:
    world = World(2)
    live = Policy("p", "p", "/p", None, None, None, announced_at=0.0)
    world.fleet.add_policy(live)
    world.send(key(tokens(random.Random(7), 500), model="p"))
    assert len(world.router.index) > 0
    del world.fleet.policies["p"]
    world.router.follow(world.fleet)
    assert len(world.router.index) == 0


def test_what_no_kv_cache_can_hold_any_more_is_forgotten() -> None:
    rng = random.Random(8)
    world = World(1, facts=replace(FACTS, kv_cache_tokens=10_000))
    prompts = [key(tokens(rng, 500)) for _ in range(40)]
    sizes = []
    for prompt in prompts:
        world.send(prompt)
        sizes.append(len(world.router.index))
    assert max(sizes) * prompts[0].piece_tokens <= 10_000
    assert world.router.choose(prompts[-3], world.fleet.candidates(None)).route is Route.AFFINITY
    assert world.router.choose(prompts[0], world.fleet.candidates(None)).route is Route.UNMATCHED


def test_a_batch_goes_where_its_first_prompt_was_and_counts_whole() -> None:
    rng = random.Random(9)
    world = World(3)
    first, second = tokens(rng, 400), tokens(rng, 400)
    home = world.send(key(first)).replica
    choice = world.send(key([first, second]))
    assert (choice.replica, choice.route) == (home, Route.AFFINITY)
    assert 2 * 256 * 4 + 350 <= choice.load <= 2 * 256 * 4 + 450


def test_answers_teach_how_long_answers_are() -> None:
    rng = random.Random(10)
    world = World(1)
    asked = structs.replace(key(tokens(rng, 100)), max_tokens=None)
    before = world.send(asked).load
    for _ in range(300):
        world.router.finished(asked, b'{"usage":{"completion_tokens":2000}}')
    assert world.send(asked).load > 3 * before
    world.router.finished(asked, b"not an answer")


def test_a_retried_rollout_says_so_and_is_remembered() -> None:
    world = World(2)
    prompt = key(tokens(random.Random(11), 300))
    choice = world.router.choose(prompt, world.fleet.candidates(None), retried=True)
    assert choice.route is Route.RETRIED
    assert world.send(prompt).replica == choice.replica


def test_a_request_without_a_prompt_is_not_counted() -> None:
    world = World(2)
    nothing = RequestKey(model="", pieces=(), stream=False)
    assert [world.send(nothing).replica for _ in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert not world.router.counts


def test_round_robin_takes_turns_whatever_was_seen() -> None:
    world = World(3, routing="round_robin")
    prompt = key(tokens(random.Random(12), 300))
    assert [world.send(prompt).replica for _ in range(6)] == [0, 1, 2, 0, 1, 2]
