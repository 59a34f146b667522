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
    limit_s: float
    """Seconds after which it ends at the latest, whatever it has not shown."""
    least_hits: int = 20
    """Rollouts in flight that each kind of fault must have hit: fewer prove nothing."""
    aim_s: float = 5.0
    """A fault waits for so long at most until rollouts are in flight on what it is to strike."""
    shares: int = 4
    """How often other faults are dealt for each of those that end a run of TRL, so that some runs last."""
    restarts: bool = True
    """Whether replicas are killed and restarted as well."""


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
    limit_s=600,
)

QUICK = replace(SIMULATORS, rollouts=2_000, seconds=80, limit_s=240, least_hits=5)

VLLM = Scale(
    vllm=True,
    replicas=2,
    rollouts=500,
    seconds=60,
    every_s=3.0,
    publish_s=6.0,
    in_flight=16,
    fault_s=(11.0, 14.0),  # longer than the proxy bears silence
    vocabulary=1000,
    lengths=(128, 256, 512),
    recover_s=240,
    limit_s=900,
    least_hits=1,
    aim_s=20.0,
    shares=1,
)

VLLM_QUICK = replace(VLLM, limit_s=240, restarts=False)
