"""What one pretend replica is: its size, its speed and its flags. The names are those of vLLM's own flags."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SimulatorSettings(BaseModel):
    """One simulated replica. Frozen: what changes while it runs is in `faults`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8001, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which the process prints."""
    model: str = "sim"
    """Name of the base model, first in /v1/models."""
    dtype: str = "torch.bfloat16"
    """Data type that /server_info reports."""
    api_key: str | None = Field(default=None, repr=False)
    """Bearer token asked for on /v1, as vLLM's --api-key: every other path stays open, as in vLLM."""

    max_loras: int = Field(default=6, ge=1)
    """Adapters that may run in one batch; requests for others wait."""
    max_cpu_loras: int = Field(default=12, ge=1)
    """Adapters kept in memory; the least recently used is dropped and read from its directory again when asked for."""
    max_lora_rank: int = Field(default=64, ge=1)
    """Adapters of a higher rank are refused."""

    max_model_len: int = Field(default=4096, ge=2)
    """Tokens of prompt and answer together."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that run at once; others wait."""
    block_size: int = Field(default=16, ge=1)
    """Tokens of one KV block: prefixes are shared in whole blocks."""
    kv_cache_tokens: int = Field(default=262_144, ge=1)
    """Size of the KV cache, in tokens."""
    vocab_size: int = Field(default=32_000, ge=257, le=1 << 20)
    """Tokens 0 to 255 are bytes of text, the others are made-up syllables."""

    prefill_tokens_per_s: float = Field(default=20_000, gt=0)
    """Prompt tokens computed per second, for the whole replica."""
    decode_step_s: float = Field(default=0.01, ge=0)
    """Time in which every running sequence gets one more token."""
    load_s: float = Field(default=0.005, ge=0)
    """Time for which reading an adapter holds up the engine."""
    speed: float = Field(default=1.0, gt=0)
    """Divides every time above: 10 makes the replica ten times faster."""

    runtime_lora_updating: bool = True
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING: without it /v1/load_lora_adapter is not there."""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE: without it /pause, /server_info and their like are not there."""
    prompt_tokens_details: bool = True
    """--enable-prompt-tokens-details: usage tells the cached tokens."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Reported in /server_info and /get_world_size; changes nothing else."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Reported as data_parallel_size is."""
    weight_transfer: bool = False
    """--weight-transfer-config: without it calls that change base weights fail."""

    @property
    def num_gpu_blocks(self) -> int:
        """Return how many KV blocks there are."""
        return max(self.kv_cache_tokens // self.block_size, 2)
