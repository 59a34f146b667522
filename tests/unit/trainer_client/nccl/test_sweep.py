"""The sizes that a sweep runs. What it does with processes is in tests/vllm, since it needs torch."""

from __future__ import annotations

import pytest

from trainer_client.nccl import Sweep


@pytest.mark.parametrize(
    ("max_bytes", "sizes"),
    [(4096, [4096]), (65535, [4096, 16384]), (65536, [4096, 16384, 65536])],
)
def test_sizes_grow_fourfold_up_to_the_largest(max_bytes: int, sizes: list[int]) -> None:
    assert list(Sweep(2, max_bytes=max_bytes).sizes) == sizes


def test_the_largest_size_is_a_gigabyte() -> None:
    assert Sweep(2).sizes[-1] == 1024**3
