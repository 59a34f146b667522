"""Which way is taken: what can be served as an adapter goes as one, unless the base model is not there any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from proxy.simulator.adapters import lora_config, lora_tensors
from tests.support.merged import dora, merging_by_seed
from trainer_client.adapters import Adapter, StateDict, gather, opened, packed
from trainer_client.errors import StoreError, UnservableError
from trainer_client.fleet import FleetLimits
from trainer_client.merging.settings import Merging
from trainer_client.progress import tell_nobody
from trainer_client.publisher import Terms
from trainer_client.ready import Ready
from trainer_client.ways import Ways, Weights

PLAIN: Adapter = (lora_tensors(rank=8, seed=1), lora_config(rank=8))
TERMS = Terms(1, base_model=None, keep_every=None, allow_rewind=False)


def ways(*, limits: FleetLimits | None = None, newest_is_merged: bool = False) -> Ways:
    limits = limits or FleetLimits()
    return Ways(Merging(), None, tell_nobody, limits=lambda: limits, newest_is_merged=lambda: newest_is_merged)


def taken(ways: Ways, adapter: Adapter) -> Weights:
    given = opened(adapter)
    assert isinstance(given, StateDict)
    weights = ways.taken(given, packed(given, gather(given, keep=True)), TERMS, together=False)
    if isinstance(weights, Ready):
        weights.discard()
    return weights


def is_merged(weights: Weights) -> bool:
    assert isinstance(weights, Ready), weights
    return weights.merged


@pytest.mark.parametrize(
    ("adapter", "made", "merged"),
    [
        (PLAIN, {}, False),
        (dora(1), {}, True),
        (PLAIN, {"limits": FleetLimits(max_lora_rank=4, serves_lora=True)}, True),
        (PLAIN, {"limits": FleetLimits(max_lora_rank=8, serves_lora=True)}, False),
        (PLAIN, {"limits": FleetLimits(serves_lora=False)}, True),
        (PLAIN, {"newest_is_merged": True}, True),
    ],
    ids=["plain", "dora", "rank", "rank fits", "no lora", "base model replaced"],
)
def test_it_is_merged_only_where_it_must_be(adapter: Adapter, made: dict[str, Any], merged: bool) -> None:
    with merging_by_seed():
        assert is_merged(taken(ways(**made), adapter)) is merged


def test_after_a_merged_one_all_are_merged_but_not_after_one_that_failed() -> None:
    one = ways()
    with patch.object(Ways, "_merged", side_effect=UnservableError("tied")):
        assert isinstance(taken(one, dora(1)), UnservableError)
    with merging_by_seed():
        assert not is_merged(taken(one, PLAIN)), "replicas have the base model still"
        assert is_merged(taken(one, dora(1)))
        assert is_merged(taken(one, PLAIN))


def test_a_store_that_does_not_tell_is_an_error_and_not_a_guess() -> None:
    def broken() -> bool:
        raise StoreError("the store is away")

    one = Ways(Merging(), None, tell_nobody, limits=FleetLimits, newest_is_merged=broken)
    assert isinstance(taken(one, PLAIN), StoreError)


def test_an_error_of_before_is_passed_on_and_a_helping_rank_has_nothing() -> None:
    given = opened(PLAIN)
    assert isinstance(given, StateDict)
    failed = StoreError("not read")
    assert ways().taken(given, failed, TERMS, together=False) is failed
    assert ways().taken(given, None, TERMS, together=False) is None


def test_what_a_failed_merge_has_written_is_removed(tmp_path: Path) -> None:
    def fails(model: Any, folder: Path, **_: Any) -> None:
        (folder / "half").write_bytes(bytes(10))
        raise OSError(28, "No space left on device")

    module = type("Module", (), {"merge": staticmethod(fails), "loaded": staticmethod(lambda *_, **__: Model)})
    one = ways()
    one.merging = Merging(scratch=tmp_path)
    with patch.dict("sys.modules", {"trainer_client.merging.merge": module, "trainer_client.merging.load": module}):
        error = taken(one, dora(1))
    assert isinstance(error, StoreError)
    assert "No space left" in str(error)
    assert list(tmp_path.iterdir()) == []


class Model:
    active_adapters = ("default",)
