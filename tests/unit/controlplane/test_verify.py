"""What the answer to a probe shows, whatever it is that has answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.controlplane.answer import Answer
from proxy.controlplane.verify import Proof, read_proof


def told(prompt_logprobs: Any) -> Answer:
    return Answer(200, json.dumps({"choices": [{"prompt_logprobs": prompt_logprobs}]}))


def test_the_values_of_the_prompt() -> None:
    answer = told([None, {"5": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"7": {"logprob": -2}}])
    assert read_proof(answer) == Proof(spoiled=False, logprobs=(-1.5, -2.0))


def test_what_is_not_finite_is_spoiled() -> None:
    assert read_proof(told([None, {"5": {"logprob": float("nan")}}])).spoiled
    refused = {"error": {"message": "Out of range float values are not JSON compliant"}}
    assert read_proof(Answer(400, json.dumps(refused))).spoiled


@pytest.mark.parametrize("odd", [None, 5, [], [5, 5], [None, None], [None, {}], [None, {"5": 3}], [None, {"5": {}}]])
def test_garbage_shows_nothing(odd: Any) -> None:
    assert not read_proof(told(odd)).spoiled and not read_proof(told(odd)).logprobs
    assert not read_proof(Answer(200, json.dumps(odd))).spoiled
