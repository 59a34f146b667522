"""What of tracing is plain: phases laid out in time, and headers with a context in them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span

from proxy.tracing.context import context_of, with_context
from proxy.tracing.syncs import laid_out

SECONDS = st.floats(0, 1000)


@given(st.dictionaries(st.text(max_size=5), SECONDS), st.integers(10**18, 2 * 10**18))
def test_phases_follow_each_other_without_a_gap_and_end_at_the_end(phases: dict[str, float], ended: int) -> None:
    found = laid_out(phases, ended=ended)
    assert [name for name, _, _ in found] == list(phases)
    assert all(end - begin == int(phases[name] * 1e9) for name, begin, end in found)
    assert all(one[2] == next_one[1] for one, next_one in pairwise(found))
    assert not found or found[-1][2] == ended


def test_a_context_goes_through_headers_and_takes_the_place_of_another() -> None:
    sent = (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    context = context_of([(b"accept", b"*/*"), sent])
    assert f"{get_current_span(context).get_span_context().span_id:x}" == "f067aa0ba902b7"
    stale = (b"traceparent", b"00-11111111111111111111111111111111-2222222222222222-00")
    assert with_context([(b"x-request-id", b"1"), stale], context) == [(b"x-request-id", b"1"), sent]


@given(st.binary(max_size=60))
def test_a_context_that_cannot_be_read_is_none(value: bytes) -> None:
    assert not get_current_span(context_of([(b"traceparent", value)])).get_span_context().is_valid
