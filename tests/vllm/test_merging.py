"""An adapter merged into its base model tensor by tensor is what peft makes of both, and the model stays as it is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.checkpoint import INDEX, MODEL_CONFIG, WHOLE, differences, read_checkpoint
from proxy.errors import SettingsError
from tests.support.peft_models import tiny_peft_model
from trainer_client import UnservableError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

ON_ATTENTION = {"target_modules": ["q_proj", "v_proj"]}

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"], **ON_ATTENTION},
    "a whole block saved": {"modules_to_save": ["mlp"], **ON_ATTENTION},
    "biases": {"bias": "all"},
    "a bias of its own": {"lora_bias": True, **ON_ATTENTION},
    "rank above vLLM's": {"r": 600, "use_rslora": True, **ON_ATTENTION},
    "embeddings and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "dora on embeddings": {"target_modules": ["embed_tokens"], "use_dora": True},
    "a few tokens": {"trainable_token_indices": [1, 5], **ON_ATTENTION},
}


def trained(**lora: Any) -> Any:
    """Return a tiny model every trainable tensor of which has been changed."""
    import torch

    model = tiny_peft_model(**lora)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def merge(model: Any, folder: Path, *, dtype: str | None = None, max_shard_bytes: int = 1 << 30) -> list[Path]:
    from trainer_client.merging.merge import merge

    return merge(model, folder, adapter="default", dtype=dtype, max_shard_bytes=max_shard_bytes)


def written(folder: Path) -> dict[str, Any]:
    """Return the tensors of a checkpoint as transformers reads them."""
    from transformers import AutoModelForCausalLM

    tensors: dict[str, Any] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return tensors


@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_what_peft_merges_and_nothing_is_changed(kind: str, tmp_path: Path) -> None:
    import torch

    model = trained(**KINDS[kind])
    before, config = copy.deepcopy(model.state_dict()), model.get_base_model().config.to_dict()
    merge(model, tmp_path)
    after = model.state_dict()
    assert model.get_base_model().config.to_dict() == config
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(getattr(module, "merged", False) for module in model.modules()), "peft takes it for merged"

    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    found = written(tmp_path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    without = copy.deepcopy(model).unload().state_dict()
    assert not all(torch.equal(found[name], tensor) for name, tensor in without.items()), "the adapter does not show"


def test_it_has_the_names_shapes_and_config_of_the_base_models_own_checkpoint(tmp_path: Path) -> None:
    import torch

    model = trained(use_dora=True)
    copy.deepcopy(model).unload().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    (tmp_path / "merged").mkdir()
    merge(model, tmp_path / "merged", dtype="torch.bfloat16", max_shard_bytes=30_000)
    base, merged = read_checkpoint(tmp_path / "base"), read_checkpoint(tmp_path / "merged")
    assert list(differences(merged, base)) == []
    assert {tensor.dtype for tensor in written(tmp_path / "merged").values()} == {torch.bfloat16}
    configs = [json.loads((tmp_path / which / MODEL_CONFIG).read_text()) for which in ("base", "merged")]
    assert configs[0] == configs[1]


def test_shards_are_of_bounded_size_and_one_needs_no_index(tmp_path: Path) -> None:
    from safetensors import safe_open

    (tmp_path / "many").mkdir()
    (tmp_path / "one").mkdir()
    files = merge(trained(), tmp_path / "many", max_shard_bytes=20_000)
    assert {file.name for file in files} == {file.name for file in (tmp_path / "many").iterdir()}
    shards = [file for file in files if file.suffix == ".safetensors"]
    assert len(shards) > 3
    for shard in shards:
        with safe_open(shard, "np") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written(tmp_path / "many").values())
    assert [file.name for file in merge(trained(), tmp_path / "one")] == [MODEL_CONFIG, WHOLE]


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (merge(trained(use_dora=True), tmp_path / name, max_shard_bytes=40_000) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_a_model_in_half_precision_is_rounded_once(tmp_path: Path) -> None:
    import torch

    model = trained().to(torch.bfloat16)
    merge(model, tmp_path)
    exact = copy.deepcopy(model).to(torch.float32).merge_and_unload().state_dict()
    found = written(tmp_path)
    assert all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in exact.items())


def tied(**lora: Any) -> Any:
    """Return a model whose head is its embeddings."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    base = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True))
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **lora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "modules_to_save" in name:
                parameter.add_(0.1)
    return model


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    merge(tied(**ON_ATTENTION), tmp_path)
    assert "lm_head.weight" not in read_checkpoint(tmp_path).shapes
    assert "model.embed_tokens.weight" in read_checkpoint(tmp_path).shapes


def test_tied_embeddings_that_were_trained_as_one_stay_so(tmp_path: Path) -> None:
    import torch

    model = tied(modules_to_save=["embed_tokens"], ensure_weight_tying=True, **ON_ATTENTION)
    merge(model, tmp_path)
    assert "lm_head.weight" not in read_checkpoint(tmp_path).shapes
    expected = copy.deepcopy(model).merge_and_unload()
    assert torch.equal(written(tmp_path)["lm_head.weight"], expected.state_dict()["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "lora",
    [{"modules_to_save": ["lm_head"], **ON_ATTENTION}, {"target_modules": ["q_proj", "embed_tokens"]}],
    ids=["a head of its own", "an adapter on the embeddings"],
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
def test_what_the_servers_tie_must_not_become_two(tmp_path: Path, lora: dict[str, Any]) -> None:
    with pytest.raises(UnservableError, match=r"lm_head.*model\.embed_tokens.*ensure_weight_tying=True"):
        merge(tied(**lora), tmp_path)


def test_what_cannot_be_merged_says_why(tmp_path: Path) -> None:
    import torch

    model = trained()
    with pytest.raises(SettingsError, match="'float33' is no floating type of torch"):
        merge(model, tmp_path, dtype="float33")
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.data[0, 0] = torch.nan
    with pytest.raises(UnservableError, match=r"layers\.0\.self_attn\.q_proj\.weight has values that are NaN"):
        merge(model, tmp_path)
    model.get_base_model().is_quantized = True
    with pytest.raises(UnservableError, match="the base model is quantized"):
        merge(model, tmp_path)


def test_what_has_no_weights_to_merge_is_not_taken_for_the_base_model(tmp_path: Path) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    base = copy.deepcopy(trained()).unload()
    with pytest.raises(UnservableError, match="PROMPT_TUNING adds tokens and no weights"):
        merge(get_peft_model(base, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")), tmp_path)
    activated = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[1, 2], **ON_ATTENTION)
    with pytest.raises(UnservableError, match="peft cannot merge LORA as it is set"):
        merge(get_peft_model(base, activated), tmp_path)


def test_other_methods_are_merged_by_their_own_rules(tmp_path: Path) -> None:
    import torch
    from peft import LoHaConfig, get_peft_model

    base = copy.deepcopy(trained()).unload()
    model = get_peft_model(base, LoHaConfig(r=4, alpha=8, init_weights=False, **ON_ATTENTION))
    merge(model, tmp_path)
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    assert all(torch.equal(written(tmp_path)[name], tensor) for name, tensor in expected.items())


def test_experts_get_the_names_of_their_own_checkpoint(tmp_path: Path) -> None:
    """In memory transformers keeps them in one tensor, in checkpoints one by one, and so do the servers read them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
    base = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, num_experts_per_tok=2, tie_word_embeddings=False))
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=4, use_dora=True, init_lora_weights=False, **ON_ATTENTION))
    (tmp_path / "merged").mkdir()
    merge(model, tmp_path / "merged")
    found = read_checkpoint(tmp_path / "merged")
    assert list(differences(found, read_checkpoint(tmp_path / "base"))) == []
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in found.shapes
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    for name, tensor in written(tmp_path / "merged").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_of_a_directory_the_base_model_is_loaded(tmp_path: Path) -> None:
    import torch

    from trainer_client.merging.load import loaded

    model = trained(use_dora=True)
    copy.deepcopy(model).unload().save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    files = {file.name: file.read_bytes() for file in (tmp_path / "adapter").glob("adapter_*")}
    again = loaded(files, base_model=str(tmp_path / "base"), source="the adapter", scratch=tmp_path)
    (tmp_path / "merged").mkdir()
    merge(again, tmp_path / "merged")
    expected = copy.deepcopy(model).merge_and_unload().state_dict()
    found = written(tmp_path / "merged")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    with pytest.raises(UnservableError, match=r"the adapter cannot be merged into .*nowhere"):
        loaded(files, base_model=str(tmp_path / "nowhere"), source="the adapter", scratch=tmp_path)
    with pytest.raises(UnservableError, match="does not name its base model"):
        loaded(files, base_model="", source="the adapter", scratch=tmp_path)
