"""What runs in a Job in place of `vllm`: a simulated replica with vLLM's own arguments.

usage: python -m tests.hub.job_replica serve MODEL --host HOST --port PORT --enable-lora --max-loras N ...

SIM_SPOIL names a folder. A replica that takes a file out of it is spoiled, as SIM_SPOIL_HOW says: `dies` prints a
traceback's last words and ends, `hangs` prints that it is loading and never listens.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from proxy.simulator.server import run
from proxy.simulator.settings import SimulatorSettings

DYING_WORDS = "torch.OutOfMemoryError: CUDA out of memory"
HANGING_WORDS = "Loading safetensors checkpoint shards: 0%"


def main() -> None:
    """Read vLLM's arguments and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--enable-lora", action="store_true", required=True)
    for name in ("--max-loras", "--max-cpu-loras", "--max-lora-rank"):
        parser.add_argument(name, type=int, required=True)
    given = vars(parser.parse_args())
    # vLLM has these paths only with its two variables, and so has this.
    runtime = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
    for name in ("command", "enable_lora"):
        del given[name]
    _spoil()
    run(SimulatorSettings(**given, runtime_lora_updating=runtime, dev_mode=dev_mode))


def _spoil() -> None:
    if not _taken(Path(os.environ.get("SIM_SPOIL", "/nonexistent"))):
        return
    if os.environ["SIM_SPOIL_HOW"] == "dies":
        sys.exit(f"Traceback (most recent call last):\n{DYING_WORDS}")
    print(HANGING_WORDS, flush=True)
    threading.Event().wait()


def _taken(folder: Path) -> bool:
    for file in folder.glob("*"):
        with suppress(FileNotFoundError):
            file.unlink()
            return True
    return False


if __name__ == "__main__":
    main()
