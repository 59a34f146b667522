"""What is asked of the Hub while files land, and what its answers mean: on a clock that no test has to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.artifacts.bucket import BucketFolder, HubFile
from proxy.artifacts.hub_listing import HubAccess, Landing
from proxy.errors import ArtifactError

FOLDER = BucketFolder("me/runs", "run/run-v1")
CONFIG, WEIGHTS = HubFile("adapter_config.json", 2, "a" * 64), HubFile("adapter_model.safetensors", 7, "b" * 64)
HUB = HubAccess("https://hub", {"authorization": "Bearer hf_secret"})


class PretendHub:
    """A Hub whose files land at a time of their own, on a clock that only `wait` moves."""

    def __init__(self, landed_at: Mapping[str, float], *, stale_s: float = 0.0) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.errors: list[httpx2.Response | Exception] = []
        self._landed_at = landed_at
        self._stale_s = stale_s

    def landing(self, *files: HubFile, deadline: float = 300.0) -> Landing:
        return Landing(FOLDER, files or (CONFIG, WEIGHTS), hub=HUB, deadline=deadline, clock=lambda: self.now)

    def wait(self, landing: Landing) -> float:
        """Answer until it is whole, and return when that was."""
        while not landing.whole:
            answer = self._answer(**landing.request())
            if isinstance(answer, Exception):
                landing.failed(answer)
            else:
                landing.learn(answer)
            self.now += landing.pause_s
        return self.now

    def _answer(self, method: str, url: str, **_: object) -> httpx2.Response | Exception:
        self.asked.append(method)
        if self.errors:
            return self.errors.pop(0)
        if method == "GET":
            assert unquote(url) == "https://hub/api/buckets/me/runs/tree/run/run-v1/"
            there = [file for file in (CONFIG, WEIGHTS) if self._landed_at[file.name] <= self.now - self._stale_s]
            entries = [
                {"type": "file", "path": FOLDER.file(f.name), "size": f.size, "xetHash": f.xet_hash} for f in there
            ]
            return httpx2.Response(200, json=[{"type": "directory", "path": "x"}, *entries])
        name = unquote(url).rpartition("/")[2]
        if self._landed_at[name] > self.now:
            return httpx2.Response(404, headers={"X-Error-Code": "EntryNotFound"})
        file = next(file for file in (CONFIG, WEIGHTS) if file.name == name)
        return httpx2.Response(302, headers={"X-Xet-Hash": str(file.xet_hash), "X-Linked-Size": str(file.size)})


def _hub(config: float = 0.0, weights: float = 0.0, *, stale_s: float = 0.0) -> PretendHub:
    return PretendHub({CONFIG.name: config, WEIGHTS.name: weights}, stale_s=stale_s)


def test_what_is_listed_already_takes_one_question() -> None:
    hub = _hub(config=-1, weights=-1, stale_s=0.5)
    assert (hub.wait(hub.landing()), hub.asked) == (0.0, ["GET"])


@given(config=st.floats(0, 250), weights=st.floats(0, 250), stale_s=st.sampled_from([0.0, 0.5, 3.0]))
def test_it_is_whole_once_every_file_is_listed_and_soon_after(config: float, weights: float, stale_s: float) -> None:
    hub = _hub(config, weights, stale_s=stale_s)
    listed_at = max(config, weights) + stale_s
    done_at = hub.wait(hub.landing())
    # the pause before the question that finds it, and one before the listing if that was old
    assert listed_at <= done_at <= listed_at + 2 * max(0.25 if stale_s else 0.05, min(listed_at / 40, 2.0)) + 0.01


@given(landed_at=st.floats(0, 290))
def test_the_hubs_limits_are_kept(landed_at: float) -> None:
    hub = _hub(landed_at, landed_at)
    hub.wait(hub.landing())
    assert hub.asked.count("GET") <= 2
    assert hub.asked.count("HEAD") < 320


def test_stale_listings_are_not_asked_for_more_than_four_times_a_second() -> None:
    hub = _hub(1.0, 1.0, stale_s=60.0)
    hub.wait(hub.landing())
    assert hub.asked.count("GET") < 4 * 61


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (HubFile(CONFIG.name, 3, CONFIG.xet_hash), "adapter_config.json has 2 bytes there, not 3"),
        (HubFile(CONFIG.name, 2, "c" * 64), "adapter_config.json has other content there"),
    ],
)
def test_other_bytes_are_never_taken_for_the_file(file: HubFile, words: str) -> None:
    hub = _hub()
    with pytest.raises(ArtifactError, match=rf"after \d\.\d s the Hub does not list .* whole: {words}"):
        hub.wait(hub.landing(file, WEIGHTS, deadline=5.0))
    assert hub.now <= 5.0


def test_where_nothing_is_known_of_a_file_it_only_has_to_be_there() -> None:
    hub = _hub(2.0, 1.0)
    assert hub.wait(hub.landing(HubFile(CONFIG.name), HubFile(WEIGHTS.name))) >= 2.0


def test_the_error_names_what_is_missing() -> None:
    hub = _hub(weights=1000)
    with pytest.raises(ArtifactError) as raised:
        hub.wait(hub.landing(deadline=2.0))
    assert str(raised.value).endswith(f"list the files in {FOLDER} whole: adapter_model.safetensors is not there")


@pytest.mark.parametrize("headers", [{"Retry-After": "7"}, {"RateLimit": '"api";r=0;t=7'}])
def test_a_hub_that_asks_to_wait_is_not_asked_before(headers: dict[str, str]) -> None:
    hub = _hub()
    hub.errors.append(httpx2.Response(429, headers=headers))
    assert hub.wait(hub.landing()) == 7.0


def test_a_hub_that_asks_to_wait_beyond_the_deadline_ends_it_at_once() -> None:
    hub = _hub()
    hub.errors.append(httpx2.Response(429, headers={"Retry-After": "300"}))
    with pytest.raises(ArtifactError, match="the Hub answers 429"):
        hub.wait(hub.landing(deadline=60.0))
    assert hub.now == 0.0


@pytest.mark.parametrize(
    "trouble",
    [
        httpx2.Response(503),
        httpx2.Response(500),
        httpx2.Response(400),
        httpx2.Response(200, text="<html>log in</html>"),
        httpx2.Response(200, json={"error": "x"}),
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("slow"),
    ],
)
def test_trouble_is_outlasted(trouble: httpx2.Response | Exception) -> None:
    hub = _hub(1.0, 1.0)
    hub.errors += [trouble, trouble]
    assert 1.0 <= hub.wait(hub.landing()) < 2.0


@pytest.mark.parametrize(
    "answer",
    [httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"}), httpx2.Response(401), httpx2.Response(403)],
)
def test_a_bucket_that_is_not_there_is_told_at_once_and_with_the_remedy(answer: httpx2.Response) -> None:
    hub = _hub()
    hub.errors.append(answer)
    with pytest.raises(ArtifactError, match=r"bucket me/runs is not at https://hub, .*hf buckets create me/runs"):
        hub.wait(hub.landing())


def test_no_question_outlasts_the_deadline_and_no_token_is_printed() -> None:
    hub = _hub(5, 5)
    landing = hub.landing(deadline=3.0)
    assert landing.request()["timeout"] == 3.0
    assert "hf_secret" not in f"{landing!r} {HUB!r}"
