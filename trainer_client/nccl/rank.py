"""One process of the sweep: `python -m trainer_client.nccl.rank TASK`. Needs torch.

A byte on stdin lets it run the next size. It reports one JSON line per size, first one for the start, to the file
descriptor that the task names. It ends when stdin closes, in the middle of a collective too, so that no rank outlives
the process that started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

ELEMENT_BYTES = 4
"""float32."""


def main() -> None:
    """Run the task in argv[1]: operation, sizes, backend, device, rank, ranks, store, report_to."""
    task = json.loads(sys.argv[1])
    go = threading.Semaphore(0)
    threading.Thread(target=_follow_parent, args=(go,), daemon=True).start()
    with os.fdopen(task["report_to"], "w", encoding="utf-8", buffering=1) as reports:
        _join(task)
        print(json.dumps({}), file=reports)
        for size in task["sizes"]:
            go.acquire()
            print(json.dumps(_measure(task, size)), file=reports)
        go.acquire()


def _follow_parent(go: threading.Semaphore) -> None:
    # Not through sys.stdin, whose lock would be in the way when the interpreter ends.
    while os.read(0, 1):
        go.release()
    os._exit(0)


def _join(task: dict[str, Any]) -> None:
    import torch

    options: dict[str, Any] = {}
    if task["device"] != "cpu":
        torch.cuda.set_device(task["device"])
        # With a device the communicator is made now, not by the first collective, whose time is measured.
        options["device_id"] = torch.device(task["device"])
    torch.distributed.init_process_group(
        task["backend"],
        init_method=f"file://{task['store']}",
        rank=task["rank"],
        world_size=task["ranks"],
        **options,
    )


def _measure(task: dict[str, Any], size: int) -> dict[str, Any]:
    """Seconds of a first and a second call, and whether the second one's values are right."""
    first_s, _ = _timed(task, size)
    again_s, right = _timed(task, size)
    return {"first_s": first_s, "again_s": again_s, "right": right}


def _timed(task: dict[str, Any], size: int) -> tuple[float, bool]:
    call, is_right = CALLS[task["operation"]](task, max(1, size // ELEMENT_BYTES // task["ranks"]) * task["ranks"])
    _synchronize(task)
    start = time.perf_counter()
    call()
    _synchronize(task)
    return time.perf_counter() - start, is_right()


def _synchronize(task: dict[str, Any]) -> None:
    import torch

    if task["device"] != "cpu":
        torch.cuda.synchronize()


Call = tuple[Callable[[], Any], Callable[[], bool]]
"""The collective, and a look at whether what it left behind is right."""


def _all_reduce(task: dict[str, Any], elements: int) -> Call:
    import torch

    ranks = task["ranks"]
    tensor = torch.full((elements,), float(task["rank"] + 1), device=task["device"])
    expected = ranks * (ranks + 1) / 2
    return lambda: torch.distributed.all_reduce(tensor), lambda: bool((tensor == expected).all())


def _broadcast(task: dict[str, Any], elements: int) -> Call:
    import torch

    tensor = torch.full((elements,), float(task["rank"] + 1), device=task["device"])
    return lambda: torch.distributed.broadcast(tensor, src=0), lambda: bool((tensor == 1.0).all())


def _all_gather(task: dict[str, Any], elements: int) -> Call:
    import torch

    ranks, device = task["ranks"], task["device"]
    own = torch.full((elements // ranks,), float(task["rank"] + 1), device=device)
    whole = torch.zeros(elements, device=device)
    # Every rank's part has to be in its place: NVIDIA/nccl#1906 gathers the right values in the wrong order.
    expected = torch.arange(1.0, ranks + 1, device=device).unsqueeze(1)
    return (
        lambda: torch.distributed.all_gather_into_tensor(whole, own),
        lambda: bool((whole.view(ranks, -1) == expected).all()),
    )


CALLS: dict[str, Callable[[dict[str, Any], int], Call]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
}


if __name__ == "__main__":
    main()
