"""PROXY_DISCOVER: its three forms are read, and everything else is refused with what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sources import DnsSource, FileSource, JobsSource, Source, parse_source

WORD = st.text(st.sampled_from("abcxyz019-_."), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("jobs:run=math-r1", JobsSource((("run", "math-r1"),))),
        ("jobs:run=a,role=replica", JobsSource((("run", "a"), ("role", "replica")))),
        ("jobs:run=a=b, namespace=org, port=9000", JobsSource((("run", "a=b"),), "org", 9000)),
        ("dns:vllm.default.svc.cluster.local:8000", DnsSource("vllm.default.svc.cluster.local", 8000)),
        (" file:/run/replicas ", FileSource(Path("/run/replicas"))),
        ("file:with:colon", FileSource(Path("with:colon"))),
    ],
)
def test_the_three_forms(text: str, source: Source) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "none of"),
        ("vllm:8000", "none of"),
        ("file:", "none of"),
        ("dns:vllm", "not HOST:PORT"),
        ("dns::8000", "not HOST:PORT"),
        ("dns:a:b:8000", "not HOST:PORT"),
        ("dns:vllm:0", "not a port"),
        ("dns:vllm:٣", "not a port"),
        ("jobs:", "not LABEL=VALUE"),
        ("jobs:run", "not LABEL=VALUE"),
        ("jobs:run=", "not LABEL=VALUE"),
        ("jobs:run=a,run=b", "'run' twice"),
        ("jobs:namespace=org", "every Job"),
        ("jobs:run=a,port=http", "not a port"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="has ") as caught:
        parse_source(text)
    assert said in str(caught.value)


@given(st.dictionaries(WORD.filter(lambda name: name not in ("namespace", "port")), WORD, min_size=1))
def test_labels_round_trip(labels: dict[str, str]) -> None:
    source = JobsSource(tuple(labels.items()))
    assert parse_source(str(source)) == source
