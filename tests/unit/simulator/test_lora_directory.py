"""What is read from a directory and what is refused. `tests/vllm` compares the words with vLLM's."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from proxy.simulator.lora_directory import AdapterNotFoundError, AdapterRefusedError, read_adapter, resolve
from proxy.simulator.tokens import adapter_weights
from tests.support.adapters import BROKEN, write_broken

ACCEPTED = {"rank_pattern_4", "rslora", "wrong_names", "wrong_shape", "nan"}


def test_a_good_adapter(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    files = read_adapter(directory, max_rank=8)
    assert files.digest == adapter_weights(directory)
    assert files.finite


@pytest.mark.parametrize("kind", sorted(BROKEN.keys() - ACCEPTED - {"no_config"}))
def test_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(AdapterRefusedError):
        read_adapter(write_broken(tmp_path / kind, kind), max_rank=8)


@pytest.mark.parametrize("kind", sorted(ACCEPTED))
def test_accepted(tmp_path: Path, kind: str) -> None:
    assert read_adapter(write_broken(tmp_path / kind, kind), max_rank=8).finite == (kind != "nan")


def test_not_there(tmp_path: Path) -> None:
    for directory in (tmp_path / "nothing", write_broken(tmp_path / "no_config", "no_config")):
        with pytest.raises(AdapterNotFoundError):
            read_adapter(directory, max_rank=8)


@pytest.mark.parametrize(("bits", "finite"), [(0x3F80, True), (0x7F80, False), (0x7FC0, False), (0x7F7F, True)])
def test_bfloat16_is_checked_too(tmp_path: Path, bits: int, finite: bool) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB"]
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": [1, 1], "data_offsets": [2 * at, 2 * at + 2]}
            for at, name in enumerate(names)
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<HH", 0x3F80, bits)
    (directory / "adapter_model.safetensors").write_bytes(data)
    assert read_adapter(directory, max_rank=8).finite is finite


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    (directory / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterRefusedError):
        read_adapter(directory, max_rank=8)


def test_a_config_without_its_fields_is_refused(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", seed=1)
    (directory / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    with pytest.raises(AdapterRefusedError, match="Missing required configuration fields"):
        read_adapter(directory, max_rank=8)


def test_a_tilde_is_the_home_directory() -> None:
    assert resolve("~/a") == Path.home() / "a"
