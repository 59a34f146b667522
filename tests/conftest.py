"""Profiles of the property tests, a place of its own for what hf_xet keeps, and an offline Hub for who asks for one.

No deadline: how long one example takes says more of the machine than of the code. `HYPOTHESIS_PROFILE=deep` looks
twenty times as far.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.hub.offline_hub import OfflineHub

settings.register_profile("fast", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True, scope="session")
def own_xet_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep hf_xet's cache out of the user's home. It reads the variable once, when it is first used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        yield


@pytest.fixture(scope="session")
def lasting_hub() -> Iterator[OfflineHub]:
    """A Hub for the whole session. Ask for `hub`."""
    with OfflineHub(programs={"vllm": ["python", "-m", "tests.hub.job_replica"]}) as hub:
        yield hub


@pytest.fixture
def hub(lasting_hub: OfflineHub) -> OfflineHub:
    """An empty Hub without faults."""
    lasting_hub.reset()
    return lasting_hub


@pytest.fixture
def hub_of_this_process(hub: OfflineHub, monkeypatch: pytest.MonkeyPatch) -> OfflineHub:
    """The same, and what in this process asks for the Hub finds it: HF_ENDPOINT counts only until the first import."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    for name, value in hub.environment().items():
        monkeypatch.setenv(name, value)
    return hub
