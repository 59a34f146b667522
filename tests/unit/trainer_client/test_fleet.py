"""What a fleet can serve follows from what its replicas tell, and nothing from those that do not tell."""

from __future__ import annotations

import pytest

from proxy.artifacts.verdict import Verdict, Way
from proxy.contract import ReplicaStatus
from trainer_client.fleet import NO_LORA, FleetLimits, limits_of, on_fleet

BF16 = "torch.bfloat16"


def replica(rank: int | None = None, dtype: str | None = None) -> ReplicaStatus:
    return ReplicaStatus(index=0, url="http://a", state="ready", max_lora_rank=rank, dtype=dtype)


@pytest.mark.parametrize(
    ("replicas", "limits"),
    [
        ([], FleetLimits()),
        ([replica()], FleetLimits()),
        ([replica(16, BF16), replica()], FleetLimits(16, True, BF16)),
        ([replica(16, BF16), replica(8, BF16)], FleetLimits(8, True, BF16)),
        ([replica(None, BF16)], FleetLimits(None, False, BF16)),
        ([replica(8, BF16), replica(None, BF16)], FleetLimits(8, False, BF16)),
    ],
)
def test_limits_are_those_that_hold_everywhere(replicas: list[ReplicaStatus], limits: FleetLimits) -> None:
    assert limits_of(replicas) == limits
    assert limits.known == any(told.dtype for told in replicas)


@pytest.mark.parametrize("serves_lora", [True, None])
def test_where_lora_is_served_or_nobody_tells_the_files_decide(serves_lora: bool | None) -> None:
    for way in Way:
        verdict = Verdict(way, ("why",))
        assert on_fleet(verdict, FleetLimits(serves_lora=serves_lora)) == verdict


def test_without_lora_what_is_sound_goes_merged() -> None:
    limits = FleetLimits(serves_lora=False)
    assert on_fleet(Verdict(Way.ADAPTER), limits) == Verdict(Way.MERGED, (NO_LORA,))
    assert on_fleet(Verdict(Way.MERGED, ("rank",)), limits) == Verdict(Way.MERGED, ("rank", NO_LORA))
    assert on_fleet(Verdict(Way.BROKEN, ("NaN",)), limits).way is Way.BROKEN
