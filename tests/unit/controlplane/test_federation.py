"""Pages of metrics from several replicas become one that Prometheus can read."""

from __future__ import annotations

from proxy.controlplane.answer import Answer
from proxy.controlplane.federation import merged, only

PAGE = """\
# HELP vllm:running Sequences that run.
# TYPE vllm:running gauge
vllm:running{engine="0",model_name="a {b}"} 3.0
# HELP vllm:seconds A histogram.
# TYPE vllm:seconds histogram
vllm:seconds_bucket{le="1"} 1.0
vllm:seconds_bucket{le="+Inf"} 2.0
vllm:seconds_count 2.0
vllm:seconds_sum 3.5
up 1 1700000000000
"""


def test_samples_stand_together_and_name_their_replica() -> None:
    assert merged({0: Answer(200, PAGE), 3: Answer(200, PAGE)}) == (
        "# HELP vllm:running Sequences that run.\n"
        "# TYPE vllm:running gauge\n"
        'vllm:running{replica="0",engine="0",model_name="a {b}"} 3.0\n'
        'vllm:running{replica="3",engine="0",model_name="a {b}"} 3.0\n'
        "# HELP vllm:seconds A histogram.\n"
        "# TYPE vllm:seconds histogram\n"
        'vllm:seconds_bucket{replica="0",le="1"} 1.0\n'
        'vllm:seconds_bucket{replica="0",le="+Inf"} 2.0\n'
        'vllm:seconds_count{replica="0"} 2.0\n'
        'vllm:seconds_sum{replica="0"} 3.5\n'
        'vllm:seconds_bucket{replica="3",le="1"} 1.0\n'
        'vllm:seconds_bucket{replica="3",le="+Inf"} 2.0\n'
        'vllm:seconds_count{replica="3"} 2.0\n'
        'vllm:seconds_sum{replica="3"} 3.5\n'
        'up{replica="0"} 1 1700000000000\n'
        'up{replica="3"} 1 1700000000000\n'
    )


def test_who_does_not_answer_is_named_and_spoils_nothing() -> None:
    page = merged(
        {0: Answer(None, "ConnectError"), 1: Answer(500, "two\nlines 1"), 2: Answer(200, "<html>hi</html>\nup 1")}
    )
    assert page == (
        '# replica 0 is left out: no answer ConnectError\n# replica 1 is left out: 500 two lines 1\nup{replica="2"} 1\n'
    )


def test_nobody_is_an_empty_page() -> None:
    assert merged({}) == ""


def test_a_page_can_be_asked_for_some_metrics_only() -> None:
    page = merged({0: Answer(200, PAGE), 1: Answer(503, "away")})
    assert only(page, ["vllm:running"]) == (
        "# HELP vllm:running Sequences that run.\n"
        "# TYPE vllm:running gauge\n"
        'vllm:running{replica="0",engine="0",model_name="a {b}"} 3.0\n'
    )
    assert only(page, ["vllm:run"]) == ""
