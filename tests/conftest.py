"""Profiles of the property tests. No deadline: how long one example takes says more of the machine than of the code.

`HYPOTHESIS_PROFILE=deep` looks twenty times as far.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fast", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
