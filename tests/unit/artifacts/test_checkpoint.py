"""A checkpoint is whole or it is none, wherever it was cut off, and takes the place of its like alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.artifacts.checkpoint import INDEX, MODEL_CONFIG, WHOLE, differences, read_checkpoint
from proxy.errors import ArtifactError
from proxy.simulator.adapters import Geometry
from proxy.simulator.checkpoints import write_checkpoint

SMALL = Geometry(hidden=8, intermediate=8, layers=2, heads=2, kv_heads=1)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_one_file_or_several_are_the_same_model(tmp_path: Path, shards: int) -> None:
    whole = read_checkpoint(write_checkpoint(tmp_path / "whole", seed=1, geometry=SMALL))
    parts = read_checkpoint(write_checkpoint(tmp_path / "parts", seed=2, shards=shards, geometry=SMALL))
    assert whole.architectures == ("Qwen2ForCausalLM",)
    assert whole.shapes["model.layers.1.self_attn.q_proj.weight"] == (8, 8)
    assert list(differences(whole, parts)) == []
    assert whole.bytes == (tmp_path / "whole" / WHOLE).stat().st_size


@given(share=st.floats(0, 1, exclude_max=True), shards=st.integers(1, 3), pick=st.integers(0, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_what_was_cut_off_is_refused(tmp_path: Path, share: float, shards: int, pick: int) -> None:
    directory = write_checkpoint(tmp_path / f"of-{shards}", seed=1, shards=shards, geometry=SMALL)
    files = sorted(directory.iterdir())
    file = files[pick % len(files)]
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ArtifactError, match=directory.name):
        read_checkpoint(directory)
    file.write_bytes(content)
    read_checkpoint(directory)


def test_an_index_names_files_of_its_own_directory_alone(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", seed=1, shards=2, geometry=SMALL)
    index = json.loads((directory / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    for said, weight_map in [
        ("no file in its own directory", index["weight_map"] | {first: "../elsewhere.safetensors"}),
        ("lacks no.such.tensor", index["weight_map"] | {"no.such.tensor": index["weight_map"][first]}),
        ("no weight_map", None),
        ("no weight_map", [1]),
    ]:
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ArtifactError, match=said):
            read_checkpoint(directory)


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"', "[" * 100_000])
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    directory = write_checkpoint(tmp_path / "model", seed=1, geometry=SMALL)
    (directory / MODEL_CONFIG).write_text(content)
    with pytest.raises(ArtifactError, match=MODEL_CONFIG):
        read_checkpoint(directory)


def test_every_difference_is_told(tmp_path: Path) -> None:
    base = read_checkpoint(write_checkpoint(tmp_path / "base", seed=1, geometry=SMALL))
    fewer = read_checkpoint(write_checkpoint(tmp_path / "fewer", seed=1, geometry=Geometry(8, 8, 1, 2, 1)))
    wider = read_checkpoint(write_checkpoint(tmp_path / "wider", seed=1, geometry=Geometry(16, 8, 2, 2, 1)))
    (lacks,) = differences(fewer, base)
    assert lacks.startswith("it lacks model.layers.1.mlp.down_proj.weight") and lacks.endswith("and 4 more")
    (has,) = differences(base, fewer)
    assert "which the model has not" in has
    assert any("has shape [16, 8], not [8, 8]" in one for one in differences(wider, base))
