"""A hung engine: what still answers, what does not, and what happens when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.support.replicas import Replica, wait_until

PATIENCE_S = 1.5


@contextmanager
def hung(replica: Replica) -> Iterator[Future[httpx2.Response]]:
    """Hang the engine, with one request in it: real vLLM notices nothing before it has something to do."""
    replica.hang()
    try:
        with ThreadPoolExecutor(1) as threads:
            sent = threads.submit(replica.completion)
            try:
                wait_until(lambda: not replica.answers("/is_paused", within_s=PATIENCE_S), what="a hung engine")
                yield sent
            finally:
                replica.unhang()
            assert sent.result().status_code == 200
    finally:
        replica.unhang()


def times_out(call: Callable[[], object]) -> bool:
    try:
        call()
    except httpx2.TimeoutException:
        return True
    return False


def test_the_server_in_front_of_a_hung_engine_still_looks_well(replica: Replica) -> None:
    with hung(replica) as sent:
        for path in ("/health", "/v1/models", "/metrics", "/load", "/version"):
            assert replica.answers(path, within_s=PATIENCE_S * 3), path
        for path in ("/is_paused", "/weight_info"):
            assert not replica.answers(path, within_s=PATIENCE_S), path
        assert not sent.done()


def test_a_load_that_timed_out_on_a_hung_engine_takes_effect_later(
    replica: Replica, adapter: Callable[..., Path], name: str
) -> None:
    body = {"lora_name": name, "lora_path": str(adapter())}
    with hung(replica):
        assert times_out(lambda: replica.client.post("/v1/load_lora_adapter", json=body, timeout=PATIENCE_S))
        assert name not in replica.models()
    wait_until(lambda: name in replica.models(), what="the load has taken effect")


def test_an_unload_does_not_need_the_engine(replica: Replica, loaded: Callable[..., str]) -> None:
    name = loaded()
    with hung(replica):
        assert replica.unload(name).status_code == 200
        assert name not in replica.models()


def test_a_pause_that_timed_out_on_a_hung_engine_takes_effect_later(replica: Replica) -> None:
    with hung(replica):
        assert times_out(lambda: replica.client.post("/pause?mode=keep", timeout=PATIENCE_S))
        with ThreadPoolExecutor(1) as threads:
            replica.unhang()
            wait_until(lambda: replica.client.get("/is_paused").json()["is_paused"], what="paused after all")
            threads.submit(replica.client.post, "/resume").result()


def test_resets_and_resumes_hang_as_well(replica: Replica) -> None:
    with hung(replica):
        for path in ("/reset_prefix_cache", "/resume"):
            assert times_out(lambda path=path: replica.client.post(path, timeout=PATIENCE_S)), path  # type: ignore[misc]
