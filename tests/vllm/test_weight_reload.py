"""Base weights from checkpoints on two real replicas: every rollout is of the version that it names, token by token.

The checkpoints are what a trainer would save: the tiny model of transformers, with other weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from proxy.artifacts.checkpoint import MODEL_CONFIG
from proxy.contract import RELOAD_PATH
from tests.support.background import Background
from tests.support.base_model import TIE, BaseModel
from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica, started, wait_until
from tests.support.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

PATIENCE_S = 60
"""On few cores vLLM's workers keep everybody waiting."""

PAUSE_S = 0.2
"""Between two rollouts of a thread: a test of seconds then leaves a hundred to be compared, not a thousand."""

PROMPT = [100, 200, 300, 40]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[VllmReplica]]:
    with started([VllmReplica(), VllmReplica()]) as replicas:
        yield replicas


@dataclass
class Run:
    """What a training run has saved so far."""

    directory: Path
    model: BaseModel
    versions: dict[str, BaseModel]
    """The weights by version; `0`: those that the replicas were started with."""

    def save(self) -> Path:
        """Take a step and save a checkpoint of it, in one file or in several."""
        version = len(self.versions)
        self.model.change(version)
        self.versions[str(version)] = self.model.copy()
        return self.model.save(self.directory / f"run-v{version}", shard_size=("5GB", "400KB")[version % 2])

    @property
    def newest(self) -> BaseModel:
        return self.model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    model = BaseModel()
    return Run(tmp_path_factory.mktemp("run"), model, {"0": model.copy()})


@contextmanager
def proxy_before(pair: list[VllmReplica], mode: str) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair), PROXY_RELOAD=mode) as proxy:
        wait_until(lambda: proxy.states() == ["ready", "ready"], limit_s=PATIENCE_S, what="both are ready")
        yield proxy


def reload(proxy: RunningProxy, path: Path) -> httpx2.Response:
    return proxy.client.post(RELOAD_PATH, json={"name": path.name, "path": str(path)}, timeout=120)


def outcomes(answer: httpx2.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    report = answer.json()
    assert report["warnings"] == []
    return [one["status"] for one in report["replicas"]]


def labels(pair: list[VllmReplica]) -> list[str]:
    return [replica.client.get("/weight_info").json()["weight_version"] for replica in pair]


def greedy(url: str, *, tokens: int = 12) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx2.post(f"{url}/v1/completions", json={"model": "tiny", **body}, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@dataclass(frozen=True)
class Rollout:
    """One that was answered."""

    prompt: list[int]
    tokens: list[int]
    versions: list[str]
    """Of X-Policy-Version."""
    replica: str


class BaseTraffic(Background):
    """Greedy rollouts of the base model from several threads until the block ends. Leaving it fails if one was lost."""

    def __init__(self, proxy: RunningProxy, *, tokens: int, threads: int = 4) -> None:
        super().__init__(threads=threads, patience_s=PATIENCE_S)
        self.rollouts: list[Rollout] = []
        self._url = proxy.url
        self._tokens = tokens

    @property
    def count(self) -> int:
        """Rollouts answered so far."""
        return len(self.rollouts)

    def _work(self, seed: int) -> None:
        chance = random.Random(seed)
        with httpx2.Client(base_url=self._url, timeout=PATIENCE_S, trust_env=False) as client:
            while not self._stop.wait(PAUSE_S):
                try:
                    self.rollouts.append(self._ask(client, [chance.randrange(4, VOCAB_SIZE) for _ in range(20)]))
                except (httpx2.HTTPError, AssertionError) as error:
                    self.problems.append(f"{type(error).__name__} {error}")
                    return

    def _ask(self, client: httpx2.Client, prompt: list[int]) -> Rollout:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, f"{answer.status_code} {answer.text[:300]}"
        choice = answer.json()["choices"][0]
        assert len(choice["token_ids"]) == self._tokens
        versions = answer.headers.get("X-Policy-Version", "0").split(",")
        return Rollout(prompt, choice["token_ids"], versions, answer.headers["X-Proxy-Upstream"])


def assert_of_their_versions(rollouts: list[Rollout], versions: Mapping[str, BaseModel]) -> None:
    """Hold every token against transformers: those that a rollout names have sampled it, and no other version."""
    prompts, answers = [rollout.prompt for rollout in rollouts], [rollout.tokens for rollout in rollouts]
    found = {version: model.behind(prompts, answers) for version, model in versions.items()}
    for position, rollout in enumerate(rollouts):
        behind = {version: found[version][position] for version in versions}
        assert _could_have(rollout.versions, behind), (rollout, behind)
        for version in behind.keys() - set(rollout.versions):
            assert max(behind[version]) > 4 * TIE, f"version {version} would have said the same"


def _could_have(versions: list[str], behind: Mapping[str, list[float]]) -> bool:
    """Whether the first version can have sampled the first tokens, up to some place, and the last one the rest."""
    first, last = behind[versions[0]], behind[versions[-1]]
    if len(versions) == 1:
        return max(first) < TIE
    return any(max([*first[:at], *last[at:]]) < TIE for at in range(len(first) + 1))


def test_rolling_every_rollout_is_of_the_one_version_that_it_names(pair: list[VllmReplica], run: Run) -> None:
    with proxy_before(pair, "rolling") as proxy, BaseTraffic(proxy, tokens=40) as traffic:
        traffic.wait_more(10)
        for _ in range(2):
            assert outcomes(reload(proxy, run.save())) == ["reloaded", "reloaded"]
            traffic.wait_more(20)
        wait_until(lambda: proxy.states() == ["ready", "ready"], limit_s=PATIENCE_S, what="both serve again")
        traffic.wait_more(20)
    assert {len(rollout.versions) for rollout in traffic.rollouts} == {1}
    assert {rollout.versions[0] for rollout in traffic.rollouts} == {"0", "1", "2"}
    assert {rollout.replica for rollout in traffic.rollouts if rollout.versions == ["2"]} == {"0", "1"}
    assert_of_their_versions(traffic.rollouts, run.versions)
    assert labels(pair) == ["2~run-v2"] * 2


def test_together_what_is_in_flight_is_of_both_versions_and_says_so(pair: list[VllmReplica], run: Run) -> None:
    with proxy_before(pair, "together") as proxy, BaseTraffic(proxy, tokens=200) as traffic:
        traffic.wait_more(4)
        wait_until(lambda: proxy.inflight() >= 3, limit_s=PATIENCE_S, what="some are in flight")
        assert outcomes(reload(proxy, run.save())) == ["reloaded", "reloaded"]
        traffic.wait_more(8)
    seen = {",".join(rollout.versions) for rollout in traffic.rollouts}
    assert seen == {"2", "2,3", "3"}
    assert_of_their_versions(traffic.rollouts, {version: run.versions[version] for version in ("2", "3")})
    assert labels(pair) == ["3~run-v3"] * 2


def _truncated(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])


def _without_a_shard(path: Path) -> None:
    sorted(path.glob("*.safetensors"))[0].unlink()


def _of_another_kind(path: Path) -> None:
    config = json.loads((path / MODEL_CONFIG).read_text())
    (path / MODEL_CONFIG).write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))


def _of_another_shape(path: Path) -> None:
    """Turn one matrix on its side: as many bytes, in a header of the same length."""
    file = sorted(path.glob("*.safetensors"))[0]
    shaped = file.read_bytes().replace(b'"shape":[1024,128]', b'"shape":[128,1024]')
    assert shaped != file.read_bytes()
    file.write_bytes(shaped)


@pytest.mark.parametrize(
    ("spoil", "status", "said"),
    [
        (_truncated, 409, "truncated"),
        (_without_a_shard, 409, "cannot be read"),
        (_of_another_kind, 400, "LlamaForCausalLM"),
        (_of_another_shape, 400, "has shape"),
    ],
)
def test_a_bad_checkpoint_is_refused_before_any_replica_is_touched(
    pair: list[VllmReplica], run: Run, tmp_path: Path, spoil: Callable[[Path], None], status: int, said: str
) -> None:
    bad = run.model.save(tmp_path / "run-v99", shard_size="400KB")
    spoil(bad)
    before = [greedy(replica.url) for replica in pair], labels(pair)
    with proxy_before(pair, "rolling") as proxy:
        told = [posts(replica) for replica in pair]
        refused = reload(proxy, bad)
        assert refused.status_code == status, refused.text
        assert said in refused.json()["error"]["message"] and "run-v99" in refused.json()["error"]["message"]
        assert [posts(replica) for replica in pair] == told, "a replica was told something"
        assert proxy.states() == ["ready", "ready"]
    assert ([greedy(replica.url) for replica in pair], labels(pair)) == before


def posts(replica: VllmReplica) -> int:
    """Return how many POSTs the server has logged."""
    return replica.log.read_text().count('"POST /')


def test_a_replica_that_dies_after_a_reload_serves_nothing_until_it_has_the_version_again(
    pair: list[VllmReplica], run: Run
) -> None:
    with proxy_before(pair, "rolling") as proxy:
        newest = run.save()
        assert outcomes(reload(proxy, newest)) == ["reloaded", "reloaded"]
        version = newest.name.removeprefix("run-v")
        with BaseTraffic(proxy, tokens=20, threads=2) as traffic:
            traffic.wait_more(10)
            pair[1].kill()
            restart(pair[1], proxy)
            traffic.wait_more(20)
        assert "1" in {rollout.replica for rollout in traffic.rollouts[-20:]}
    assert {tuple(rollout.versions) for rollout in traffic.rollouts} == {(version,)}
    assert_of_their_versions(traffic.rollouts, {version: run.newest, "0": run.versions["0"]})
    assert run.newest.would_say(PROMPT, greedy(pair[1].url))


def restart(replica: VllmReplica, proxy: RunningProxy) -> None:
    """Start a replica that was killed, the second one, and wait until it serves again."""
    wait_until(lambda: proxy.states() == ["ready", "down"], limit_s=PATIENCE_S, what="its death is seen")
    replica.stop()
    replica.start()
    wait_until(lambda: proxy.states() == ["ready", "ready"], limit_s=PATIENCE_S, what="it serves again")
    assert "quarantined" in proxy.log().rpartition("down -> joining")[2], "it was not reloaded before"


def test_a_replica_killed_in_the_middle_of_a_reload_is_reloaded_and_serves_again(
    pair: list[VllmReplica], run: Run
) -> None:
    before = run.model.copy()
    with proxy_before(pair, "rolling") as proxy:
        newest = run.save()
        pair[1].hang()  # nobody notices before it has something to do
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(reload, proxy, newest)
            wait_until(lambda: proxy.replicas()[1]["weights"] == "updating", limit_s=PATIENCE_S, what="it reads")
            with BaseTraffic(proxy, tokens=20, threads=2) as traffic:
                traffic.wait_more(20)
                assert proxy.states()[1] == "quarantined" and not pending.done()
                pair[1].kill()
                report = pending.result().raise_for_status().json()
                assert {one["replica"]: one["status"] for one in report["replicas"]} == {
                    pair[0].url: "reloaded", pair[1].url: "left",
                }  # fmt: skip
                restart(pair[1], proxy)
                traffic.wait_more(20)
    version = newest.name.removeprefix("run-v")
    assert {tuple(rollout.versions) for rollout in traffic.rollouts} == {(version,)}
    assert_of_their_versions(traffic.rollouts, {version: run.newest, "before": before})
    assert all(run.newest.would_say(PROMPT, greedy(replica.url)) for replica in pair)
    assert labels(pair) == labels(pair)[:1] * 2
