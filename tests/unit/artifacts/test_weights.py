"""Broken weights are found before a replica sees them, and the error names file, tensor and reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import TensorSpec, serialize_file
from safetensors.numpy import save_file

from proxy.artifacts.check import check_adapter, judge
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE
from proxy.artifacts.verdict import MAX_FAULTS_SHOWN, Way
from proxy.artifacts.weights import Tensor, read_header
from proxy.errors import ArtifactError
from proxy.simulator.adapters import Tensors, lora_config, lora_tensors, write_adapter

RANK = 8
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def write_tensors(directory: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write an adapter whose tensors `change` has altered in place."""
    tensors: Tensors = lora_tensors(rank=RANK, seed=1)
    change(tensors)
    (directory / CONFIG_FILE).write_text(json.dumps(lora_config(rank=RANK)))
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory


def write_bfloat16(directory: Path, words: np.ndarray[Any, np.dtype[np.uint16]]) -> Path:
    """Write one module in bfloat16; `words` is lora_B, bit by bit."""
    first = np.zeros((RANK, 4), np.uint16)
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in ((Q_A, first), (Q_B, words))
    }
    serialize_file(specs, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(lora_config(rank=RANK)))
    return directory


def tensors_in(path: Path) -> tuple[Tensor, ...]:
    with path.open("rb") as file:
        return read_header(file, source=str(path))


def put(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.__setitem__(name, value)


def set_value(name: str, value: float) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors[name].__setitem__((-1, -1), value)


def test_a_good_adapter_passes_and_returns_its_config(tmp_path: Path) -> None:
    assert check_adapter(write_adapter(tmp_path, seed=1, rank=RANK), max_lora_rank=RANK).config.rank == RANK


def test_lora_b_all_zero_is_a_first_version_and_fine(tmp_path: Path) -> None:
    check_adapter(write_tensors(tmp_path, lambda tensors: tensors[Q_B].fill(0)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_float_type_is_fine(tmp_path: Path, dtype: type) -> None:
    check_adapter(
        write_tensors(tmp_path, lambda tensors: tensors.update({k: v.astype(dtype) for k, v in tensors.items()}))
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_and_infinity_are_found_in_every_float_type(tmp_path: Path, dtype: type, value: float) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[Q_A] = tensors[Q_A].astype(dtype)
        tensors[Q_A][3, 5] = value

    with pytest.raises(ArtifactError, match=rf"{WEIGHTS_FILE}: {Q_A} has values that are NaN or infinite"):
        check_adapter(write_tensors(tmp_path, spoil))


@pytest.mark.parametrize(
    ("word", "finite"), [(0x7F7F, True), (0x0000, True), (0x7F80, False), (0xFF80, False), (0x7FC1, False)]
)
def test_bfloat16_is_judged_by_its_bits(tmp_path: Path, word: int, finite: bool) -> None:
    words = np.zeros((4, RANK), np.uint16)
    words[-1, -1] = word
    assert (judge(write_bfloat16(tmp_path, words)).way is Way.ADAPTER) is finite


def test_the_last_value_of_a_tensor_larger_than_one_read_counts(tmp_path: Path) -> None:
    wide = np.zeros((RANK, 40_000), np.float32)
    wide[-1, -1] = np.nan
    with pytest.raises(ArtifactError, match="NaN"):
        check_adapter(write_tensors(tmp_path, put(Q_A, wide)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(Q_B), "q_proj has no lora_B"),
        (lambda tensors: tensors.pop(Q_A), "q_proj has no lora_A"),
        (put("base_model.model.lm_head.weight", np.zeros((4, 4))), "lm_head.weight is neither a lora_A nor a lora_B"),
        (put(Q_A, np.zeros((4, 128), np.float32)), "has shape [4, 128], but its rank asks for [8, inputs]"),
        (put(Q_B, np.zeros((128, 16), np.float32)), "has shape [128, 16], but its rank asks for [outputs, 8]"),
        (put(Q_A, np.zeros((8, 4, 4, 1), np.float32)), "has shape [8, 4, 4, 1]"),
        (put(Q_A, np.zeros((8, 128), np.int8)), "has dtype I8"),
        (lambda tensors: tensors.clear(), "it holds no tensors"),
    ],
)
def test_names_shapes_and_types_are_checked(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    with pytest.raises(ArtifactError) as raised:
        check_adapter(write_tensors(tmp_path, change))
    assert reason in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_rank_pattern_decides_the_shape_of_the_modules_it_names(tmp_path: Path) -> None:
    write_tensors(
        tmp_path, lambda tensors: tensors.update({Q_A: tensors[Q_A][:4].copy(), Q_B: tensors[Q_B][:, :4].copy()})
    )
    assert len(judge(tmp_path).reasons) == 2
    pattern = {r"layers\.0\.self_attn\.q_proj": 4}
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**lora_config(rank=RANK), "rank_pattern": pattern}))
    assert judge(tmp_path).way is Way.ADAPTER


def test_faults_of_config_and_weights_are_listed_together(tmp_path: Path) -> None:
    write_tensors(tmp_path, set_value(Q_A, np.nan))
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**lora_config(rank=RANK), "use_dora": True}))
    with pytest.raises(ArtifactError, match=rf"{CONFIG_FILE}: use_dora.*; {WEIGHTS_FILE}: .*NaN"):
        check_adapter(tmp_path)


def test_a_diverged_run_is_told_in_one_line(tmp_path: Path) -> None:
    write_tensors(tmp_path, lambda tensors: [tensor.fill(np.nan) for tensor in tensors.values()])
    with pytest.raises(ArtifactError) as raised:
        check_adapter(tmp_path)
    assert str(raised.value).count("NaN") == MAX_FAULTS_SHOWN
    assert str(raised.value).endswith("and 34 more")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_a_file_that_is_still_being_written_is_refused(tmp_path: Path, keep: int) -> None:
    weights = write_adapter(tmp_path, seed=1) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ArtifactError, match=rf"{WEIGHTS_FILE} .*truncated"):
        check_adapter(tmp_path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path, seed=1) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes() + b"x")
    with pytest.raises(ArtifactError, match="truncated or damaged"):
        tensors_in(weights)


@pytest.mark.parametrize(
    "header",
    [
        "{",
        "[]",
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}',
    ],
)
def test_a_header_that_is_not_safetensors_is_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    with pytest.raises(ArtifactError, match=WEIGHTS_FILE):
        tensors_in(path)


def test_a_shape_that_disagrees_with_the_bytes_is_refused(tmp_path: Path) -> None:
    weights = write_adapter(tmp_path, seed=1) / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes().replace(b'"shape":[8,128]', b'"shape":[8,127]', 1))
    with pytest.raises(ArtifactError, match=r"which is not \[8, 127\] values"):
        check_adapter(tmp_path)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    (write_adapter(tmp_path, seed=1) / WEIGHTS_FILE).unlink()
    with pytest.raises(ArtifactError, match=rf"{WEIGHTS_FILE} cannot be read: No such file"):
        check_adapter(tmp_path)


def test_the_header_gives_names_types_and_shapes_without_reading_values(tmp_path: Path) -> None:
    by_name = {tensor.name: tensor for tensor in tensors_in(write_adapter(tmp_path, seed=1) / WEIGHTS_FILE)}
    assert len(by_name) == 42
    assert (by_name[Q_A].dtype, by_name[Q_A].shape) == ("F32", (8, 128))
