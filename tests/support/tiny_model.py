"""The tiny random Qwen2 that real vLLM serves in the tests, made once and kept in .vllm/ (which git ignores).

Run as a script by the Python of .venv-vllm it writes the model; imported, it only knows where the model is.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from proxy.simulator.adapters import Geometry

REPO = Path(__file__).parents[2]
VLLM_BIN = REPO / ".venv-vllm" / "bin"
MODEL = REPO / ".vllm" / "model"

VOCAB_SIZE = 1024
CONTEXT_TOKENS = 2048

_READY = "ready"
_SHARPNESS = 4.0
"""Factor on the random matrices: without it the logits are so flat that an adapter hardly changes the best token."""

_SPECIAL_TOKENS = ["<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_BUILD_LIMIT_S = 120


def tiny_model() -> Path:
    """Return the model's directory, made first if need be."""
    if not (MODEL / _READY).exists():
        subprocess.run(
            [VLLM_BIN / "python", "-m", "tests.support.tiny_model"], cwd=REPO, check=True, timeout=_BUILD_LIMIT_S
        )
    return MODEL


def _build(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _save_tokenizer(directory)
    _save_weights(directory, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id)
    (directory / _READY).touch()  # last: an interrupted build is done again


def _save_tokenizer(directory: Path) -> Any:
    tokenizers = importlib.import_module("tokenizers")
    transformers = importlib.import_module("transformers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 24,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([inspect.getsource(module) for module in (json, inspect, subprocess)], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<|im_end|>", unk_token=None
    )
    # TRL knows chat templates by their text and refuses others, so this takes one that it ships.
    templates = Path(str(importlib.import_module("trl").__file__)).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen2_5.jinja").read_text()
    tokenizer.save_pretrained(directory)
    return tokenizer


def _save_weights(directory: Path, *, eos: int, pad: int) -> None:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    geometry = Geometry()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=geometry.hidden,
        intermediate_size=geometry.intermediate,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_SHARPNESS)
    model.to(torch.bfloat16).save_pretrained(directory)


if __name__ == "__main__":
    _build(MODEL)
    print(MODEL, file=sys.stderr)
