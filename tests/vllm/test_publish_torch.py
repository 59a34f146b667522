"""Publishing torch's tensors and peft's models, against a stand-in for the proxy: no replica is needed here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.digest import WEIGHTS_FILE
from tests.support.fake_proxy import FakeProxy
from tests.support.peft_models import step_of_training, tiny_peft_model
from trainer_client import TrainerClient, UnservableError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture
def client(tmp_path: Path) -> Any:
    with (
        FakeProxy() as proxy,
        TrainerClient(proxy.url, store=tmp_path / "store", run="torch", max_staleness=8) as client,
    ):
        yield client


def test_a_model_a_directory_and_a_state_dict_are_the_same_policy(client: TrainerClient, tmp_path: Path) -> None:
    from peft import get_peft_model_state_dict

    model = tiny_peft_model()
    model.save_pretrained(tmp_path / "saved")
    tensors = get_peft_model_state_dict(model)
    config = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    names = {client.publish(adapter, step=1).name for adapter in (model, tmp_path / "saved", (tensors, config))}
    assert len(names) == 1


def test_the_training_may_go_on_as_soon_as_the_weights_are_gathered(client: TrainerClient, tmp_path: Path) -> None:
    model = tiny_peft_model()
    model.save_pretrained(tmp_path / "saved")
    future = client.publish(model, step=1, wait=False)
    step_of_training(model, seed=1)
    assert future.result(30).digest == inspect_directory(tmp_path / "saved").digest
    assert client.publish(model, step=2).digest != future.result().digest


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_keep_their_type(client: TrainerClient, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    model = tiny_peft_model().to(getattr(torch, dtype))
    path = client.publish(model, step=1).path
    assert {tensor.dtype for tensor in load_file(path / WEIGHTS_FILE).values()} == {getattr(torch, dtype)}


def test_the_active_one_of_several_adapters_is_published(client: TrainerClient, tmp_path: Path) -> None:
    from peft import LoraConfig

    model = tiny_peft_model()
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    model.set_adapter("other")
    model.save_pretrained(tmp_path / "saved", selected_adapters=["other"])
    assert client.publish(model, step=1).digest == inspect_directory(tmp_path / "saved" / "other").digest
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnservableError, match=r"2 adapters are active \(default, other\)"):
        client.publish(model, step=2)


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all", "target_modules": ["q_proj"]}, "bias is 'all'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": r"(.*\.)?(q_proj|lm_head)"}, "lm_head"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
    ids=["dora", "modules_to_save", "bias", "lm_head", "lm_head_by_pattern", "pissa"],
)
def test_what_vllm_has_no_place_for_is_said_to_need_merging(
    client: TrainerClient, lora: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnservableError, match=f"{why}.*it could be served merged into the base model"):
        client.publish(tiny_peft_model(**lora), step=1)


def test_parameters_that_train_beside_the_adapter_are_told(
    client: TrainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_peft_model()
    model.base_model.model.model.embed_tokens.weight.requires_grad = True
    client.publish(model, step=1)
    assert "1 parameters train beside the adapter" in caplog.text
    assert "embed_tokens" in caplog.text
