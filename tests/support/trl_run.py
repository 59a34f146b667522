"""The training script of the tests: TRL's AsyncGRPOTrainer with a LoRA, unmodified, on a machine without a GPU.

With --store its syncs are publications of a TrainerClient.

usage: python -m tests.support.trl_run --help      (with the Python of .venv-vllm)

Writes OUTPUT/history.json, TRL's own log. Two things that TRL takes from a GPU are replaced from here, as a user
script could: the name of the device, and the FlashAttention kernel, by an exact eager version of it.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

from tests.support.tiny_model import MODEL
from trainer_client import TrainerClient
from trainer_client.integrations.trl import use

RANK = 8
MAX_STALENESS = 2
GROUP_SIZE = 4
COMPLETION_TOKENS = 16


def share_of_odd_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward: something that a random model can learn in a few steps."""
    return [sum(token % 2 for token in ids) / max(len(ids), 1) for ids in completion_ids]


class EagerVarlen:
    """Stands in for the FlashAttention module: causal attention over packed sequences, in float32."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float | None = None,
    ) -> Any:
        """q, k, v: (tokens, heads, head_dim), sequences one after the other; returns the same shape as q."""
        import torch

        assert causal and not softcap and window_size[0] < 0, "this stand-in knows plain causal attention only"
        scale = softmax_scale or q.shape[-1] ** -0.5
        repeat = q.shape[1] // k.shape[1]
        outputs = []
        for start_q, end_q, start_k, end_k in zip(
            cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True
        ):
            queries = q[start_q:end_q].transpose(0, 1).float()
            keys = k[start_k:end_k].transpose(0, 1).repeat_interleave(repeat, 0).float()
            values = v[start_k:end_k].transpose(0, 1).repeat_interleave(repeat, 0).float()
            scores = queries @ keys.transpose(1, 2) * scale
            offset = keys.shape[1] - queries.shape[1]
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(offset + 1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            outputs.append((weights @ values).transpose(0, 1).to(q.dtype))
        return torch.cat(outputs)


def main() -> None:
    """Train, then write the history."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.trl_run")
    parser.add_argument("--output", type=Path, required=True, help="TRL's output_dir")
    parser.add_argument("--url", required=True, help="what TRL takes for its one vLLM server")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, with a sync after each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--token-budget", type=int, default=None, help="tokens of one packed row; TRL's default is all")
    parser.add_argument("--save-steps", type=int, default=0, help="steps between two checkpoints; 0 writes none")
    parser.add_argument("--queue", type=int, default=1024, help="samples that may wait for the trainer; 0: any number")
    parser.add_argument("--resume", type=Path, help="go on from this checkpoint")
    parser.add_argument("--store", type=Path, help="publish into this directory, with a TrainerClient")
    parser.add_argument("--run", default="trl", help="as this run")
    parser.add_argument("--background", action="store_true", help="while the training goes on")
    asked = parser.parse_args()
    import torch
    import trl.experimental.async_grpo.packing as packing
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    torch.cuda.get_device_name = lambda *_, **__: "cpu"
    packing._flash_attn = lambda: EagerVarlen
    prompts = [[{"role": "user", "content": f"Say something about number {n}"}] for n in range(8)]
    trainer = AsyncGRPOTrainer(
        model=str(MODEL),
        reward_funcs=share_of_odd_tokens,
        args=AsyncGRPOConfig(
            output_dir=str(asked.output),
            vllm_server_base_url=asked.url,
            max_completion_length=COMPLETION_TOKENS,
            num_generations=GROUP_SIZE,
            weight_sync_steps=1,
            max_staleness=MAX_STALENESS,
            max_steps=asked.steps,
            queue_maxsize=asked.queue,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=asked.learning_rate,
            logging_steps=1,
            save_strategy="steps" if asked.save_steps else "no",
            save_steps=asked.save_steps or 500,
            report_to="none",
            use_cpu=True,
            bf16=False,
            dtype="bfloat16",
            temperature=1.0,
            seed=asked.seed,
            token_budget=asked.token_budget,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with ExitStack() as stack:
        if asked.store:
            client = TrainerClient(asked.url, store=asked.store, run=asked.run, max_staleness=MAX_STALENESS)
            use(trainer, stack.enter_context(client), wait=not asked.background)
        trainer.train(resume_from_checkpoint=str(asked.resume) if asked.resume else None)
    (asked.output / "history.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
