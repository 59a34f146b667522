"""The replicas' own metrics through the proxy: all of them, with its token, asked once a second at most."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from proxy.simulator.replica import fingerprint
from tests.simulated.checks import wait_quiet
from tests.simulated.flaky import FlakyReplica
from tests.support.metrics import Scrape
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators

PATH = "/proxy/replicas/metrics"
TOKEN = "hf_not_a_real_token"


def test_every_replica_is_in_it_and_only_the_proxy_needs_the_token() -> None:
    with (
        simulators(2, api_key=TOKEN) as replicas,
        RunningProxy(*(replica.url for replica in replicas), HF_TOKEN=TOKEN) as proxy,
    ):
        for seed in range(6):
            proxy.complete("sim", prompt=[seed] * 40)
        wait_quiet(proxy, *replicas)
        answer = proxy.client.get(PATH)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert TOKEN not in answer.text
        seen = Scrape(answer.text)
        for index, replica in enumerate(replicas):
            own = replica.metric("vllm:generation_tokens_total")
            assert seen.sum("vllm:generation_tokens_total", replica=str(index)) == own > 0
            assert replica.state()["authorization"]["GET /metrics"] == fingerprint(f"Bearer {TOKEN}")
        assert {sample.labels["replica"] for sample in seen.samples} == {"0", "1"}
        some = Scrape(proxy.client.get(PATH, params={"name[]": ["vllm:kv_cache_usage_perc"]}).text)
        assert [sample.name for sample in some.samples] == ["vllm:kv_cache_usage_perc"] * 2


def test_many_who_look_at_once_cost_one_call(pair: list[SimulatedReplica]) -> None:
    with RunningProxy(*(replica.url for replica in pair)) as proxy:
        before = [replica.state()["calls"].get("GET /metrics", 0) for replica in pair]
        with ThreadPoolExecutor(16) as pool:
            pages = {answer.text for answer in pool.map(lambda _: proxy.client.get(PATH), range(16))}
        after = [replica.state()["calls"].get("GET /metrics", 0) for replica in pair]
        assert len(pages) <= 2  # on a busy machine a second may pass between the first and the last
        assert [now - then for now, then in zip(after, before, strict=True)] == [len(pages)] * 2


def test_a_replica_that_answers_garbage_is_left_out(pair: list[SimulatedReplica]) -> None:
    with FlakyReplica() as flaky, RunningProxy(pair[0].url, flaky.url, PROXY_START_WAIT_S="0") as proxy:
        for garbage in ("html", "binary", "refuses", "cuts"):
            flaky.spoil("GET /metrics", garbage)
            calls = len(flaky.calls)
            seen = Scrape(proxy.client.get(PATH).text)
            while "GET /metrics" not in flaky.calls[calls:]:
                seen = Scrape(proxy.client.get(PATH).text)
            assert {sample.labels["replica"] for sample in seen.samples} == {"0"}, garbage
