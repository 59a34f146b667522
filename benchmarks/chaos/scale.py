"""How much of everything a run has. Simulators and real vLLM differ in these figures and in nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_STALENESS = 4
MAX_LORAS = MAX_STALENESS + 2
"""TRL's rule: the next policy is loaded before the oldest one is unloaded."""


@dataclass(frozen=True)
class Scale:
    """One size of run."""

    vllm: bool
    """Real vLLM on the CPU instead of simulators."""
    replicas: int
    rollouts: int
    """Rollouts that must have been answered before it ends."""
    seconds: float
    """Seconds that it lasts at least."""
    every_s: float
    """Seconds between two faults."""
    publish_s: float
    """Seconds between two policies of a run."""
    in_flight: int
    """Rollouts in flight."""
    fault_s: tuple[float, float]
    """How long a fault lasts, from and to, in seconds."""
    vocabulary: int
    """Prompts are made of the tokens below this."""
    lengths: tuple[int, ...]
    """Tokens of an answer: one of these."""
    recover_s: float
    """A replica that has not come back within so many seconds after a fault has ended never will."""
    least_hits: int = 20
    """Rollouts in flight that each kind of fault must have hit: fewer prove nothing."""


SIMULATORS = Scale(
    vllm=False,
    replicas=8,
    rollouts=10_000,
    seconds=300,
    every_s=1.0,
    publish_s=3.0,
    in_flight=48,
    fault_s=(0.5, 8.0),
    vocabulary=32_000,
    lengths=(16, 32, 64, 64, 96, 256),
    recover_s=60,
)

QUICK = replace(SIMULATORS, rollouts=2_000, seconds=80, least_hits=5)

VLLM = Scale(
    vllm=True,
    replicas=2,
    rollouts=500,
    seconds=240,
    every_s=10.0,
    publish_s=12.0,
    in_flight=16,
    fault_s=(2.0, 20.0),
    vocabulary=1000,
    lengths=(32, 64, 128, 256),
    recover_s=240,
    least_hits=1,
)
