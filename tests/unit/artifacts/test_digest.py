"""The digest names config and weights by value."""

from __future__ import annotations

import json
from pathlib import Path

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from proxy.simulator.adapters import write_adapter


def test_the_same_adapter_has_the_same_digest_whatever_the_layout_of_its_config(tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", seed=1), write_adapter(tmp_path / "two", seed=1)
    config = json.loads((two / CONFIG_FILE).read_text())
    config["target_modules"].reverse()  # peft writes a set, in an order that differs from process to process
    (two / CONFIG_FILE).write_text(json.dumps(dict(reversed(config.items()))))
    assert adapter_digest(one) == adapter_digest(two)


def test_other_weights_or_another_config_give_another_digest(tmp_path: Path) -> None:
    one, two = write_adapter(tmp_path / "one", seed=1), write_adapter(tmp_path / "two", seed=2)
    three = write_adapter(tmp_path / "three", seed=1, base_model="other")
    assert len({adapter_digest(one), adapter_digest(two), adapter_digest(three)}) == 3


def test_a_single_bit_changes_the_digest(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path, seed=1)
    before = adapter_digest(directory)
    weights = bytearray((directory / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (directory / WEIGHTS_FILE).write_bytes(weights)
    assert adapter_digest(directory) != before
