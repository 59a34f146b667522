"""What the config of an adapter says about serving it: every reason at once, in words that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.config import AdapterConfig, parse_config, read_config, unservable
from proxy.artifacts.digest import CONFIG_FILE
from proxy.errors import ArtifactError
from proxy.simulator.adapters import lora_config, write_adapter


def config(**changes: Any) -> AdapterConfig:
    return parse_config({**lora_config(rank=8), **changes}, source="the config")


def test_a_plain_lora_is_servable(tmp_path: Path) -> None:
    found = read_config(write_adapter(tmp_path, seed=1, rank=8, base_model="me/model"))
    assert (found.rank, found.max_rank, found.alpha, found.base_model) == (8, 8, 16, "me/model")
    assert "q_proj" in found.target_modules
    assert unservable(found, max_lora_rank=8) == []


def test_fields_that_peft_writes_as_null_count_as_absent() -> None:
    found = config(rank_pattern=None, modules_to_save=None, base_model_name_or_path=None, use_dora=None)
    assert unservable(found, max_lora_rank=None) == []
    assert found.base_model == ""


def test_rslora_and_gaussian_initialisation_are_servable() -> None:
    assert unservable(config(use_rslora=True, init_lora_weights="gaussian"), max_lora_rank=8) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save holds whole modules (lm_head)"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is IA3"),
        ({"peft_type": None}, "peft_type is missing"),
        ({"r": 16, "lora_alpha": 16}, "rank 16 is above 8"),
        ({"rank_pattern": {"q_proj": 64}}, "rank 64 is above 8"),
        ({"target_modules": ["model.lm_head", "q_proj"]}, "target_modules names lm_head"),
        ({"target_modules": None}, "target_modules is missing"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"r": None}, "r is missing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is set"),
        ({"lora_bias": True}, "lora_bias is set"),
    ],
)
def test_what_vllm_refuses_is_named(changes: dict[str, Any], reason: str) -> None:
    (found,) = unservable(config(**changes), max_lora_rank=8)
    assert reason in str(found)


def test_every_reason_is_listed_at_once() -> None:
    found = unservable(config(use_dora=True, bias="all", modules_to_save=["norm"], r=64), max_lora_rank=8)
    assert len(found) == 4


def test_without_a_known_limit_any_rank_that_vllm_takes_is_left_to_the_replicas() -> None:
    assert unservable(config(r=256), max_lora_rank=None) == []
    (found,) = unservable(config(r=513), max_lora_rank=None)
    assert "rank 513 is above 512" in str(found)


@pytest.mark.parametrize(
    ("changes", "helps"),
    [({"use_dora": True}, True), ({"peft_type": "IA3"}, True), ({"r": 16}, True), ({"lora_alpha": None}, False)],
)
def test_merging_helps_where_vllm_only_lacks_a_place(changes: dict[str, Any], helps: bool) -> None:
    (found,) = unservable(config(**changes), max_lora_rank=8)
    assert found.merging_helps is helps


def test_the_rank_of_a_module_follows_the_first_pattern_that_matches_its_end() -> None:
    found = config(rank_pattern={r"layers\.0\.self_attn\.q_proj": 4, "q_proj": 2})
    assert found.rank_of("base_model.model.model.layers.0.self_attn.q_proj") == 4
    assert found.rank_of("base_model.model.model.layers.1.self_attn.q_proj") == 2
    assert found.rank_of("base_model.model.model.layers.1.self_attn.k_proj") == 8
    assert found.max_rank == 8


@pytest.mark.parametrize(
    ("field", "value"), [("r", 0), ("r", "eight"), ("rank_pattern", {"q_proj": -1}), ("rank_pattern", {"(": 8})]
)
def test_a_field_of_a_wrong_type_names_file_and_field(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**lora_config(rank=8), field: value}))
    with pytest.raises(ArtifactError, match=rf"{CONFIG_FILE}: {field}.* cannot be used"):
        read_config(tmp_path)


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[]", "is not a JSON object"), (None, "cannot")])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(ArtifactError, match=rf"{CONFIG_FILE} {words}"):
        read_config(tmp_path)
