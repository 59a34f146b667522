"""What benchmarks.chaos calls lost, wrong and stuck: a check that cannot fail would prove nothing."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos.__main__ import main
from benchmarks.chaos.judge import Asked, TokenJudge
from benchmarks.chaos.rollouts import pauses
from benchmarks.chaos.tally import ALL, Ending, Tally
from proxy.simulator.tokens import expected_tokens

ASKED = Asked("p-v1", digest="a" * 64, prompt=[1, 2, 3], seed=7, count=4)


def answer(*, digest: str = "a" * 64, model: str = "p-v1", count: int = 4, reason: str = "length") -> dict[str, Any]:
    """Return what a replica with these weights answers."""
    tokens = expected_tokens(digest, ASKED.prompt, ASKED.seed, count)
    return {"model": model, "choices": [{"token_ids": tokens, "finish_reason": reason}]}


def test_real_replicas_without_torch_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.chaos.__main__.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["benchmarks.chaos", "--vllm"])
    with pytest.raises(SystemExit):
        main()
    assert "--vllm needs torch here" in capsys.readouterr().err


def test_the_right_answer_is_right() -> None:
    assert TokenJudge().look(ASKED, answer()) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer(digest="b" * 64), "other weights"),
        (answer(model="p-v2"), "answered as p-v2"),
        (answer(count=3), "3 of 4 tokens"),
        (answer(reason="abort"), "(abort)"),
    ],
)
def test_a_wrong_answer_is_wrong(given: dict[str, Any], said: str) -> None:
    assert said in TokenJudge().look(ASKED, given)


def test_a_rollout_counts_once_in_all_and_once_for_each_fault_that_it_met() -> None:
    tally = Tally()
    tally.begins("early")
    tally.ends("early")
    tally.begins("before")
    rollout = tally.sent(ASKED)
    tally.begins("during")
    tally.ended(rollout, Ending.RETRIED)
    tally.begins("after")
    assert {kind: dict(counts) for kind, counts in tally.endings.items()} == {
        kind: {Ending.RETRIED: 1} for kind in (ALL, "before", "during")
    }
    assert (tally.answered, tally.bad, tally.in_flight) == (1, 0, set())


def test_what_was_refused_without_need_is_lost_even_if_it_is_answered_later() -> None:
    tally = Tally()
    rollout = tally.sent(ASKED)
    rollout.lost = "refused while a replica was ready"
    tally.ended(rollout, Ending.RETRIED)
    assert (tally.answered, tally.bad) == (0, 1)
    assert "refused while a replica was ready" in tally.stories[0]


def test_an_answer_that_is_found_to_be_wrong_no_longer_counts_as_right() -> None:
    tally = Tally()
    tally.begins("fault")
    tally.ended(tally.sent(ASKED), Ending.FIRST)
    tally.found_wrong(ASKED, "off by a nat")
    assert (tally.answered, tally.bad) == (0, 1)
    assert tally.endings["fault"].total() == 1


def test_it_tries_as_often_as_trl() -> None:
    waits = list(pauses())
    assert len(waits) == 3 * 30 - 1
    assert waits[:8] == [1, 2, 1, 1, 2, 2, 1, 2]
    assert max(waits) == 16
