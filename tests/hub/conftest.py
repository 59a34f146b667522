"""One offline Hub, empty for each test, and the bucket that most of them use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi

from tests.hub.offline_hub import OfflineHub

BUCKET = "tester/runs"


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
def api(hub: OfflineHub) -> HfApi:
    """A client of `hub`, which has the bucket BUCKET."""
    api = hub.api()
    api.create_bucket(BUCKET)
    return api
