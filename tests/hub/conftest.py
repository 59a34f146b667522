"""The bucket that most tests of the offline Hub use."""

from __future__ import annotations

import pytest
from huggingface_hub import HfApi

from tests.hub.offline_hub import OfflineHub

BUCKET = "tester/runs"


@pytest.fixture
def api(hub: OfflineHub) -> HfApi:
    """A client of `hub`, which has the bucket BUCKET."""
    api = hub.api()
    api.create_bucket(BUCKET)
    return api
