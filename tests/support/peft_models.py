"""A tiny random model with a LoRA on every linear layer, for tests that need torch and peft but no vLLM."""

from __future__ import annotations

from typing import Any


def tiny_peft_model(*, seed: int = 1, **lora: Any) -> Any:
    """Return a two-layer Qwen2 with a LoRA of rank 4 whose lora_B is not zero; the same seed gives the same weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    base = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **lora}
    model = get_peft_model(base, LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return model


def step_of_training(model: Any, *, seed: int) -> None:
    """Take one real optimizer step on random tokens."""
    import torch

    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
