"""What becomes of a rollout that a replica has failed: whether, and when, it may be tried again. Pure.

PROXY_RETRIES bounds the harm that one rollout can do: what hangs or kills whoever runs it must not go through the whole
fleet. But a rollout also fails by being in the wrong place several times in a row, and that must not lose it (P6). So
when its tries are used up it is held, goes on slowly, and never keeps more replicas out than before.
"""

from __future__ import annotations

from enum import Enum

AGAIN_S = 1.0
"""Seconds between the tries of a rollout that is held: a replica that answers its probes and fails every rollout is not
to be stormed."""


class Step(Enum):
    """What comes next."""

    TRY = "another replica may try at once"
    HOLD = "another may try later, when few enough of those that failed it are still out"
    GIVE_UP = "the client gets an error"


def next_step(*, tries_left: int, failed_inside: bool) -> Step:
    """Say what follows from a failed try. `tries_left`: below zero when it was one more than PROXY_RETRIES allows.

    `failed_inside`: a replica has failed inside with the rollout, perhaps because of it.
    """
    if tries_left >= 0:
        return Step.TRY
    return Step.GIVE_UP if failed_inside else Step.HOLD


def may_go_on(*, still_out: int, retries: int) -> bool:
    """Say whether a held rollout may be tried again: not if one more failure would keep too many replicas out.

    `still_out`: replicas that have failed it and have not been ready since.
    """
    return still_out <= retries
