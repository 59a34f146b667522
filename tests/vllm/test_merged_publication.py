"""Adapters that vLLM cannot serve, published merged to two real replicas: both sample as transformers does with peft's
own merge of the same adapter."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.proxies import RunningProxy
from tests.support.replicas import VllmReplica, started, wait_until
from tests.support.tiny_model import tiny_model
from trainer_client import TrainerClient, UnservableError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPTS = [[100 + number, 200, 300, 40] for number in range(4)]
TOKENS = 6
TIE = 0.25
"""Logits so near to the best one may win: vLLM and transformers add in another order, in bfloat16."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True, "target_modules": "all-linear"},
    "modules_to_save": {"modules_to_save": ["lm_head"], "target_modules": ATTENTION},
}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[VllmReplica]]:
    with started([VllmReplica() for _ in range(2)]) as replicas:
        yield replicas


@pytest.fixture(scope="module")
def proxy(pair: list[VllmReplica]) -> Iterator[RunningProxy]:
    with RunningProxy(*(replica.url for replica in pair)) as proxy:
        yield proxy


def trained(seed: int, lora: dict[str, Any]) -> Any:
    """Return the tiny model with an adapter that shows in every answer."""
    torch: Any = importlib.import_module("torch")
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(), dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM", **lora))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * max(float(parameter.std()), 0.1))
    return model


class Reference:
    """What transformers says with peft's merge, in the replicas' precision."""

    def __init__(self, model: Any) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._model = copy.deepcopy(model).merge_and_unload().to(self._torch.bfloat16)

    def wrote(self, answers: list[list[int]]) -> bool:
        """Tell whether these are its greedy answers to PROMPTS, as far as bfloat16 can tell."""
        return all(self._behind(prompt, answer) < TIE for prompt, answer in zip(PROMPTS, answers, strict=True))

    def _behind(self, prompt: list[int], answer: list[int]) -> float:
        with self._torch.no_grad():
            logits = self._model(self._torch.tensor([prompt + answer])).logits[0].float()
        places = range(len(prompt) - 1, len(prompt) - 1 + len(answer))
        return max(float(logits[at].max() - logits[at, token]) for at, token in zip(places, answer, strict=True))


def answers(url: str) -> list[list[int]]:
    """Return greedy answers to PROMPTS under the base model's name."""
    wanted = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    told = []
    for prompt in PROMPTS:
        body = {"model": "tiny", "prompt": prompt, **wanted}
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        told.append(answer.json()["choices"][0]["token_ids"])
    return told


def test_both_replicas_sample_from_the_merged_weights(
    pair: list[VllmReplica], proxy: RunningProxy, tmp_path: Path
) -> None:
    with TrainerClient(
        proxy.url, store=tmp_path / "store", run="merged", max_staleness=1, on_unservable="merge"
    ) as client:
        before = answers(proxy.url)
        names = []
        for step, (kind, lora) in enumerate(ADAPTERS.items(), start=1):
            model = trained(step, lora)
            reference = Reference(model)
            assert not reference.wrote(before), f"the {kind} does not show"
            with pytest.raises(UnservableError, match="cannot be served as an adapter"):
                client.publish(model, step=step, on_unservable="raise")
            policy = client.publish(model, step=step)
            names.append(policy.name)
            assert (policy.model, policy.version) == ("tiny", step)
            proxy.wait_states("ready", "ready")
            for replica in pair:
                before = answers(replica.url)
                assert reference.wrote(before), f"{kind}: {replica} answers {before}"
                assert replica.client.get("/weight_info").json() == {"weight_version": f"{step}~{policy.name}"}
            answer = proxy.completion(policy.model, prompt=PROMPTS[0])
            assert answer.headers["X-Policy-Version"] == str(step)
        left = {path.name for path in (tmp_path / "store" / "merged").iterdir() if path.is_dir()}
        assert left == {names[-1]}, "a replica that restarts reads the newest one, and nobody the one before"
    wait_until(lambda: proxy.inflight() == 0, what="nothing in flight")
