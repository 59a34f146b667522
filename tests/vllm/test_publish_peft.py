"""TrainerClient with a real PeftModel, in front of real vLLM: what was trained is what samples, version by version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica, wait_until
from tests.support.tiny_model import MODEL
from trainer_client import TrainerClient, UnservableError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

MAX_STALENESS = 1
PROMPT = list(range(100, 140))

SAME_WEIGHTS_NATS = 0.25
"""These adapters are far larger than trained ones, so that bfloat16 shows more; other weights differ by nats."""


@pytest.fixture(scope="module")
def replica() -> Iterator[VllmReplica]:
    with VllmReplica(max_loras=MAX_STALENESS + 2, max_cpu_loras=2 * (MAX_STALENESS + 2)) as replica:
        yield replica


def peft_model(**lora: Any) -> Any:
    """Return the tiny model with a LoRA on every linear layer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    settings = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **lora}
    return get_peft_model(base, LoraConfig(**settings))


def train(model: Any, seed: int) -> None:
    """Change the adapter's weights, as an optimizer step would, but much more."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.3, generator=generator)


def test_every_version_is_served_as_it_was_trained(replica: VllmReplica, tmp_path: Path) -> None:
    from tests.support.who_sampled import Sampled, distances

    model = peft_model()
    kept: dict[str, Path] = {}
    rollouts: list[Sampled] = []
    with (
        RunningProxy(replica.url) as proxy,
        TrainerClient(proxy.url, store=tmp_path / "store", run="real", max_staleness=MAX_STALENESS) as client,
    ):
        assert client.vllm_args(model.peft_config["default"])[-2:] == ["--max-lora-rank", "8"]
        for step in (1, 2, 3, 4):
            train(model, step)
            policy = client.publish(model, step=step)
            kept[policy.model] = tmp_path / f"kept-{step}"
            model.save_pretrained(kept[policy.model])
            answer = proxy.completion(policy.model, prompt=PROMPT, max_tokens=24, logprobs=0, ignore_eos=True)
            choice = answer.json()["choices"][0]
            reported = choice["logprobs"]["token_logprobs"]
            rollouts.append(Sampled(policy.model, "0", PROMPT, choice["token_ids"], reported))
        live = [name for name in replica.models() if name.startswith("real-v")]
        assert live == list(kept)[-MAX_STALENESS - 1 :]
        assert proxy.completion(next(iter(kept))).status_code == 404
        wait_until(lambda: proxy.inflight() == 0, what="nothing in flight")
    found = distances(rollouts, model=MODEL, adapters=kept)
    for position, rollout in enumerate(rollouts):
        for name in kept:
            distance = found[name][position]
            if name == rollout.policy:
                assert float(distance.max()) < SAME_WEIGHTS_NATS, (name, distance)
            else:
                assert float(distance.mean()) > 2 * SAME_WEIGHTS_NATS, (rollout.policy, name, distance)


@pytest.mark.parametrize(
    ("lora", "why"),
    [({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"r": 1024}, "1024")],
    ids=["dora", "modules_to_save", "rank"],
)
def test_what_vllm_cannot_serve_is_refused_before_anything_is_published(
    tmp_path: Path, lora: dict[str, Any], why: str
) -> None:
    model = peft_model(**lora)
    with (
        TrainerClient("http://127.0.0.1:9", store=tmp_path / "store", run="refused", max_staleness=1) as client,
        pytest.raises(UnservableError, match=why),
    ):
        client.publish(model, step=1)
    assert not list((tmp_path / "store").rglob("*.safetensors"))
