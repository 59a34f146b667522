"""Which announcements are repeated."""

from __future__ import annotations

import pytest

from trainer_client.proxy_api import is_retryable


@pytest.mark.parametrize(
    ("status", "again"), [(None, True), (503, True), (400, False), (404, False), (409, False), (502, False)]
)
def test_only_silence_and_not_ready_are_worth_another_try(status: int | None, again: bool) -> None:
    assert is_retryable(status) is again


def test_another_change_of_base_weights_is_waited_for() -> None:
    assert is_retryable(409, reason="under_way")
    assert not is_retryable(409, reason="checkpoint")
