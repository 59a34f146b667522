"""One verdict on an adapter, with every reason: as it is, merged into the base model, or not at all."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from proxy.artifacts.check import check_adapter, inspect, inspect_directory, judge
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from proxy.artifacts.verdict import Way
from proxy.errors import ArtifactError
from proxy.simulator.adapters import lora_config, lora_tensors, write_adapter
from tests.support.adapters import write_broken

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("rslora", Way.ADAPTER),
        ("rank_pattern_4", Way.ADAPTER),
        ("rank_16", Way.MERGED),
        ("rank_pattern_16", Way.MERGED),
        ("dora", Way.MERGED),
        ("modules_to_save", Way.MERGED),
        ("bias", Way.MERGED),
        ("lm_head", Way.MERGED),
        ("rank_in_weights_16", Way.BROKEN),
        ("missing_a", Way.BROKEN),
        ("missing_b", Way.BROKEN),
        ("nan", Way.BROKEN),
        ("truncated", Way.BROKEN),
        ("half_header", Way.BROKEN),
        ("empty_weights", Way.BROKEN),
        ("no_config", Way.BROKEN),
        ("no_weights", Way.BROKEN),
        ("bad_config", Way.BROKEN),
    ],
)
def test_the_verdict_on_each_kind_of_adapter(tmp_path: Path, kind: str, way: Way) -> None:
    verdict = judge(write_broken(tmp_path, kind), max_lora_rank=8)
    assert verdict.way is way
    assert bool(verdict.reasons) is (way is not Way.ADAPTER)
    assert all(reason.startswith((CONFIG_FILE, WEIGHTS_FILE)) for reason in verdict.reasons)


def with_tensors(directory: Path, config: dict[str, Any], **more: Any) -> Path:
    (directory / CONFIG_FILE).write_text(json.dumps({**lora_config(rank=8), **config}))
    save_file({**lora_tensors(rank=8, seed=1), **more}, directory / WEIGHTS_FILE)
    return directory


def test_what_only_the_tensors_show_is_found_as_well(tmp_path: Path) -> None:
    head = {"base_model.model.lm_head.lora_A.weight": np.zeros((8, 4)), "base_model.model.lm_head.lora_B.weight": 0}
    head["base_model.model.lm_head.lora_B.weight"] = np.zeros((4, 8))
    verdict = judge(with_tensors(tmp_path, {"target_modules": "all-linear"}, **head))
    assert verdict.way is Way.MERGED
    assert verdict.reasons == (
        f"{WEIGHTS_FILE}: base_model.model.lm_head is adapted, which vLLM does not serve faithfully",
    )


def test_a_real_dora_adapter_is_told_in_two_lines(tmp_path: Path) -> None:
    magnitudes = {f"{LAYER}.lora_magnitude_vector": np.ones(4), f"{LAYER}2.lora_magnitude_vector": np.ones(4)}
    verdict = judge(with_tensors(tmp_path, {"use_dora": True}, **magnitudes))
    assert verdict.way is Way.MERGED
    assert [reason.partition(" ")[2].split()[0] for reason in verdict.reasons] == [
        "use_dora",
        f"{LAYER}.lora_magnitude_vector",
    ]
    assert "and 1 more are neither" in verdict.reasons[1]


def test_one_sound_reason_and_one_broken_one_are_broken(tmp_path: Path) -> None:
    bad = {f"{LAYER}.lora_A.weight": np.full((8, 128), np.nan)}
    verdict = judge(with_tensors(tmp_path, {"use_dora": True}, **bad))
    assert verdict.way is Way.BROKEN
    assert len(verdict.reasons) == 2


def test_the_fleets_limit_and_vllms_own_both_count(tmp_path: Path) -> None:
    write_adapter(tmp_path, seed=1, rank=16)
    assert judge(tmp_path).way is Way.ADAPTER
    assert "rank 16 is above 8, the largest that the fleet takes" in str(judge(tmp_path, max_lora_rank=8))
    with pytest.raises(ArtifactError, match=rf"{tmp_path} cannot be served as an adapter: .*rank 16 is above 8"):
        check_adapter(tmp_path, max_lora_rank=8)


def test_one_reading_gives_sizes_hashes_and_digest(tmp_path: Path) -> None:
    write_adapter(tmp_path, seed=1, base_model="me/model")
    found = inspect_directory(tmp_path)
    assert found.digest == adapter_digest(tmp_path)
    assert found.config.base_model == "me/model"
    for file in found.files:
        content = (tmp_path / file.path).read_bytes()
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_bytes_in_memory_are_judged_like_files(tmp_path: Path) -> None:
    write_adapter(tmp_path, seed=1)
    config, weights = ((tmp_path / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE))
    assert inspect(config, io.BytesIO(weights), source="memory") == inspect_directory(tmp_path)
    with pytest.raises(ArtifactError, match=f"memory/{WEIGHTS_FILE} .*truncated"):
        inspect(config, io.BytesIO(weights[:-1]), source="memory")


def test_the_digest_of_the_config_changes_with_the_adapters_shape_alone(tmp_path: Path) -> None:
    digests = [
        inspect_directory(write_adapter(tmp_path / str(n), seed=n, rank=rank)).config_digest
        for n, rank in enumerate((8, 8, 4))
    ]
    assert digests[0] == digests[1] != digests[2]
