"""Whatever stands in a body, in whatever order: its prompt and its model are those that JSON means."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.routing.request_key import pieces_of, read_model, read_request, with_model

relaxed = settings(deadline=None)
"""A busy machine is no failure; the time limit of every test holds."""

FIELDS = ["prompt", "token_ids"]
MISLEADING = ["p", '"prompt":[1,2]', '\\"token_ids": [', "]", "[", "é"]
IDS = st.lists(st.integers(0, 200_000), max_size=60)
OTHERS = st.recursive(
    st.sampled_from(MISLEADING) | IDS,
    lambda inner: st.dictionaries(st.sampled_from([*FIELDS, *MISLEADING, "model"]), inner) | st.lists(inner),
    max_leaves=8,
)
FORMS = st.sampled_from([(",", ":"), (", ", ": ")])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    fields = [
        ("model", draw(st.sampled_from(MISLEADING))),
        (draw(st.sampled_from(FIELDS)), draw(IDS | st.sampled_from(MISLEADING))),
        ("stop", draw(OTHERS)),
        ("extra", draw(OTHERS)),
    ]
    return dict(draw(st.permutations(fields)))


@relaxed
@example({"model": "p", "extra": {"prompt": [0]}, "prompt": []}, (",", ":"), False)
@given(requests(), FORMS, st.booleans())
def test_prompt_and_model_are_the_ones_that_json_means(
    request: dict[str, Any], form: tuple[str, str], escaped: bool
) -> None:
    body = json.dumps(request, separators=form, ensure_ascii=escaped).encode()
    key = read_request(body)
    prompt = request.get("prompt", request.get("token_ids"))
    assert key.model == request["model"]
    assert key.pieces == pieces_of(json.dumps(prompt, separators=form, ensure_ascii=escaped).encode())


@relaxed
@given(requests(), FORMS)
def test_another_name_changes_nothing_else(request: dict[str, Any], form: tuple[str, str]) -> None:
    body = json.dumps(request, separators=form).encode()
    renamed = json.dumps({**request, "model": "p~00000001"}, separators=form).encode()
    for read in (read_request, read_model):
        assert with_model(body, read(body), "p~00000001") == renamed
