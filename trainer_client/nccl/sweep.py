"""Run collectives of growing sizes in processes of their own, each size with a deadline, and say which one hangs.

A collective that hangs cannot be interrupted from inside its process, so every rank is a process that this one kills.
Each operation gets fresh processes: what hung once leaves nothing behind for the next.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from proxy.errors import LoraSyncError

OPERATIONS = ("all_reduce", "broadcast", "all_gather")
"""What weight sync and FSDP use."""

MIN_BYTES, MAX_BYTES, GROWTH = 4 * 1024, 1024**3, 4
"""4 KB to 1 GB: the known hangs start at 16 to 64 MB, and NCCL changes algorithm and channels on the way there."""

DEADLINE_S = 30.0
"""1 GB over one socket at 1 GB/s between 8 ranks takes 2 s, and both calls of a size share the deadline."""

START_DEADLINE_S = 120.0
"""Importing torch, starting CUDA and making the communicator, on a cold disk."""

KILL_WAIT_S = 10.0
"""A killed process ends in milliseconds, unless the GPU driver holds it."""

DEVICES = {"nccl": "cuda", "gloo": "cpu"}
"""Backend of torch.distributed -> where its tensors are."""

LAST_WORDS = 500
"""Characters of a failed rank's output that are quoted."""


class Outcome(StrEnum):
    """How one size of one operation ended. After anything but `OK` the operation's larger sizes are left out."""

    OK = "ok"
    HANG = "hang"
    """At least one rank had not finished at the deadline."""
    WRONG = "wrong"
    """It finished, with other values than it should have."""
    FAILED = "failed"
    """A process ended with an error."""


@dataclass(frozen=True)
class Measurement:
    """One size of one operation over all ranks."""

    operation: str
    bytes: int
    """Bytes of the tensor that every rank ends up with; 0: it did not get as far as the first size."""
    outcome: Outcome
    first_s: float = 0.0
    """Seconds of the slowest rank the first time, with connecting."""
    again_s: float = 0.0
    """Seconds of the slowest rank the second time."""
    detail: str = ""
    """Which ranks, and what they said; empty if all went well."""


@dataclass(frozen=True)
class Sweep:
    """What to run. `nccl` needs a GPU per rank; `gloo` runs on CPUs, to try out everything but NCCL."""

    ranks: int
    backend: str = "nccl"
    operations: tuple[str, ...] = OPERATIONS
    max_bytes: int = MAX_BYTES
    deadline_s: float = DEADLINE_S
    start_deadline_s: float = START_DEADLINE_S
    gpus: tuple[str, ...] = ()
    """One entry for CUDA_VISIBLE_DEVICES per rank, as with Ray; empty: every rank sees all, as with torchrun."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in bytes, each four times the one before."""
        sizes = [MIN_BYTES]
        while sizes[-1] * GROWTH <= self.max_bytes:
            sizes.append(sizes[-1] * GROWTH)
        return tuple(sizes)

    def run(self) -> Iterator[Measurement]:
        """Yield a measurement per operation and size, as they end. No process outlives the iterator.

        Each step takes `deadline_s` at most, so that all take no more than operations * (start_deadline_s + sizes *
        deadline_s). Raises LoraSyncError if a process cannot be killed.
        """
        for operation in self.operations:
            with _Ranks(self, operation) as ranks:
                yield from ranks.measure()


class _StoppedError(Exception):
    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class _Ranks:
    """The processes of one operation. Leaving it ends them, whatever state they are in."""

    def __init__(self, sweep: Sweep, operation: str) -> None:
        self._sweep, self._operation = sweep, operation
        self._folder = tempfile.TemporaryDirectory(prefix="lora-sync-nccl-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._incoming: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

    def __enter__(self) -> Self:
        try:
            for rank in range(self._sweep.ranks):
                self._start(rank)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def measure(self) -> Iterator[Measurement]:
        """Yield a measurement per size, up to the first that is not good."""
        size = 0
        try:
            self._wait(self._sweep.start_deadline_s)
            for size in self._sweep.sizes:
                self._go()
                yield self._good(size, self._wait(self._sweep.deadline_s))
        except _StoppedError as stopped:
            yield Measurement(self._operation, size, stopped.outcome, detail=stopped.detail)

    def _go(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, and its pipe of reports will say so
                process.stdin.write(b"\n")

    def _wait(self, seconds: float) -> dict[int, dict[str, Any]]:
        """One report of each rank."""
        until = time.monotonic() + seconds
        reports: dict[int, dict[str, Any]] = {}
        while len(reports) < self._sweep.ranks:
            try:
                rank, report = self._incoming.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(self._sweep.ranks)) - set(reports))
                text = f"rank {_list(missing)} of {self._sweep.ranks} not done after {seconds:g} s"
                raise _StoppedError(Outcome.HANG, text) from None
            if report is None:
                raise _StoppedError(Outcome.FAILED, f"rank {rank} ended: {self._last_words(rank)}")
            reports[rank] = report
        return reports

    def _good(self, size: int, reports: dict[int, dict[str, Any]]) -> Measurement:
        if wrong := sorted(rank for rank, report in reports.items() if not report["right"]):
            raise _StoppedError(Outcome.WRONG, f"rank {_list(wrong)} got other values than were sent")
        first_s = max(report["first_s"] for report in reports.values())
        again_s = max(report["again_s"] for report in reports.values())
        return Measurement(self._operation, size, Outcome.OK, first_s, again_s)

    def _start(self, rank: int) -> None:
        # Reports go through a pipe of their own, because NCCL_DEBUG writes to stdout.
        reader, writer = os.pipe()
        with self._log(rank).open("wb") as log, os.fdopen(writer, "wb"):
            process = subprocess.Popen(
                self._command(rank, writer),
                bufsize=0,
                stdin=subprocess.PIPE,  # a rank ends when this closes, so it does not outlive this process either
                stdout=log,
                stderr=log,
                pass_fds=(writer,),
                env=self._environment(rank),
            )
        self._processes.append(process)
        self._readers.append(threading.Thread(target=self._read, args=(rank, reader), daemon=True))
        self._readers[-1].start()

    def _command(self, rank: int, writer: int) -> list[str]:
        sweep = self._sweep
        device = DEVICES[sweep.backend]
        if device == "cuda":
            device = "cuda:0" if sweep.gpus else f"cuda:{rank}"
        task = {
            "operation": self._operation,
            "sizes": sweep.sizes,
            "backend": sweep.backend,
            "device": device,
            "rank": rank,
            "ranks": sweep.ranks,
            "store": str(Path(self._folder.name) / "store"),
            "report_to": writer,
        }
        return [sys.executable, "-m", "trainer_client.nccl.rank", json.dumps(task)]

    def _environment(self, rank: int) -> Mapping[str, str]:
        return os.environ | ({"CUDA_VISIBLE_DEVICES": self._sweep.gpus[rank]} if self._sweep.gpus else {})

    def _read(self, rank: int, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                self._incoming.put((rank, json.loads(line)))
        self._incoming.put((rank, None))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _last_words(self, rank: int) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(KILL_WAIT_S)  # it says why after it has closed its pipe
        text = self._log(rank).read_text(errors="replace").strip()
        return text[-LAST_WORDS:] or "without a word"

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            try:
                process.communicate(timeout=KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                raise LoraSyncError(
                    f"process {process.pid} of the NCCL test cannot be killed: the GPU driver holds it (see dmesg)"
                ) from None
        for thread in self._readers:
            thread.join(KILL_WAIT_S)
        self._folder.cleanup()


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
