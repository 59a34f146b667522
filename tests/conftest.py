"""Profiles of the property tests, and a place of its own for what hf_xet keeps.

No deadline: how long one example takes says more of the machine than of the code. `HYPOTHESIS_PROFILE=deep` looks
twenty times as far.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("fast", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(autouse=True, scope="session")
def own_xet_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep hf_xet's cache out of the user's home. It reads the variable once, when it is first used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        yield
