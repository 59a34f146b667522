"""What a replica tells about itself: health, version, configuration and metrics."""

from __future__ import annotations

import time

from proxy.simulator.asgi import Answer, Request, as_json
from proxy.simulator.replica import Replica

_METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


async def health(replica: Replica, request: Request) -> Answer:
    """Answer 200 unless the engine is dead: a hung engine looks healthy."""
    return Answer(503 if replica.engine.dead else 200, content_type=None)


async def version(replica: Replica, request: Request) -> Answer:
    """Tell the vLLM version that this imitates."""
    return as_json({"version": "0.32.0"})


async def load(replica: Replica, request: Request) -> Answer:
    """Tell the server load, which is 0 unless vLLM is told to track it."""
    return as_json({"server_load": 0})


async def server_info(replica: Replica, request: Request) -> Answer:
    """Tell the configuration, as far as anyone reads it."""
    settings = replica.settings
    config = {
        "model_config": {
            "model": settings.model,
            "served_model_name": settings.model,
            "tokenizer": settings.model,
            "dtype": settings.dtype,
            "max_model_len": settings.max_model_len,
            "max_logprobs": 20,
            "quantization": None,
        },
        "cache_config": {
            "block_size": settings.block_size,
            "num_gpu_blocks": settings.num_gpu_blocks,
            "kv_cache_size_tokens": settings.num_gpu_blocks * settings.block_size,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256",
        },
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": settings.tensor_parallel_size,
            "data_parallel_size": settings.data_parallel_size,
            "world_size": settings.tensor_parallel_size,
            "rank": 0,
        },
        "scheduler_config": {"max_num_seqs": settings.max_num_seqs, "max_num_queued_reqs": None, "policy": "fcfs"},
        "lora_config": {
            "max_lora_rank": settings.max_lora_rank,
            "max_loras": settings.max_loras,
            "max_cpu_loras": settings.max_cpu_loras,
            "lora_dtype": settings.dtype,
        },
        "instance_id": replica.instance_id,
        "weight_transfer_config": {"backend": "nccl"} if settings.weight_transfer else None,
    }
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": settings.runtime_lora_updating,
        "VLLM_SERVER_DEV_MODE": settings.dev_mode,
    }
    as_object = request.query.get("config_format") == "json"
    shown = config if as_object else ", ".join(f"{name}={value!r}" for name, value in config.items())
    return as_json({"vllm_config": shown, "vllm_env": env, "system_env": {}})


async def metrics(replica: Replica, request: Request) -> Answer:
    """Tell the metrics that other code reads, in Prometheus' text format."""
    settings, engine = replica.settings, replica.engine
    scheduler = engine.batch.scheduler
    label = f'engine="0",model_name="{settings.model}"'
    counters, waiting = engine.batch.counters, scheduler.waiting
    # While frozen the engine reports nothing, and vLLM then shows zeros.
    frozen = engine.paused in ("keep", "abort")
    running = 0 if frozen else scheduler.running_count
    capacity, deferred = (0, 0) if frozen else (waiting.capacity, waiting.deferred)
    blocks, size = settings.num_gpu_blocks, settings.block_size
    cache = f'block_size="{size}",engine="0",num_gpu_blocks="{blocks}",kv_cache_size_tokens="{blocks * size}"'
    lines = [
        f"vllm:num_requests_running{{{label}}} {running:.1f}",
        f"vllm:num_requests_waiting{{{label}}} {capacity + deferred:.1f}",
        f'vllm:num_requests_waiting_by_reason{{{label},reason="capacity"}} {capacity:.1f}',
        f'vllm:num_requests_waiting_by_reason{{{label},reason="deferred"}} {deferred:.1f}',
        f"vllm:kv_cache_usage_perc{{{label}}} {scheduler.cache_usage:.4f}",
        f"vllm:prefix_cache_queries_total{{{label}}} {counters.cache_queries:.1f}",
        f"vllm:prefix_cache_hits_total{{{label}}} {counters.cache_hits:.1f}",
        f"vllm:num_preemptions_total{{{label}}} {counters.preemptions:.1f}",
        f"vllm:prompt_tokens_total{{{label}}} {counters.prompt_tokens:.1f}",
        f"vllm:generation_tokens_total{{{label}}} {counters.generation_tokens:.1f}",
        f'vllm:request_success_total{{{label},finished_reason="length"}} {counters.finished:.1f}',
        f'vllm:request_success_total{{{label},finished_reason="abort"}} {counters.aborted:.1f}',
        *_lora_lines(replica),
        f'vllm:cache_config_info{{{cache},enable_prefix_caching="True"}} 1.0',
    ]
    return Answer(200, ("\n".join(lines) + "\n").encode(), _METRICS_TYPE)


def _lora_lines(replica: Replica) -> list[str]:
    running, waiting = map(",".join, replica.engine.batch.scheduler.adapter_names())
    replica.lora_label_sets[running, waiting] = time.time()
    limit = replica.settings.max_loras
    return [
        f'vllm:lora_requests_info{{max_lora="{limit}",running_lora_adapters="{_escaped(running)}",'
        f'waiting_lora_adapters="{_escaped(waiting)}"}} {seen}'
        for (running, waiting), seen in replica.lora_label_sets.items()
    ]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
