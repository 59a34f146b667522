"""File descriptors: every rollout in flight takes two, one towards its client and one towards its replica."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

_OTHERS = 256
"""Descriptors for all else: control calls, the log, libraries, idle connections."""


def raise_limit(max_inflight: int) -> None:
    """Let the process open as many files as it may; warn if these are too few for PROXY_MAX_INFLIGHT rollouts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < 2 * max_inflight + _OTHERS:
        logger.warning(
            "This process may open %d files, enough for %d rollouts in flight; PROXY_MAX_INFLIGHT is %d. "
            "Raise the limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=) or lower that setting.",
            hard,
            max((hard - _OTHERS) // 2, 0),
            max_inflight,
        )
