"""One offline Hub for each test, and the bucket that most of them use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import HfApi

from tests.hub.offline_hub import OfflineHub

BUCKET = "tester/runs"


@pytest.fixture
def hub() -> Iterator[OfflineHub]:
    """An empty Hub without faults."""
    with OfflineHub() as hub:
        yield hub


@pytest.fixture
def api(hub: OfflineHub) -> HfApi:
    """A client of `hub`, which has the bucket BUCKET."""
    api = hub.api()
    api.create_bucket(BUCKET)
    return api
