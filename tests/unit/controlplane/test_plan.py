"""What a replica needs: the transcript of `plan`, and that carrying it out once is enough."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.controlplane.plan import Action, Adopt, Load, Unload, plan
from proxy.fleet.policies import Policy, PolicyState


def policy(name: str, state: PolicyState) -> Policy:
    return Policy(name, f"/lora/{name}", None, None, None, announced_at=0.0, state=state)


def test_every_case() -> None:
    states = {"live": PolicyState.LIVE, "new": PolicyState.LIVE, "coming": PolicyState.LOADING}
    states |= {"going": PolicyState.RETIRING, "gone": PolicyState.RETIRED, "bad": PolicyState.FAILED}
    policies = {name: policy(name, state) for name, state in states.items()}
    held = {name: f"/lora/{name}" for name in ["live", "coming", "going", "gone", "bad", "stranger"]}
    assert plan(policies, held) == [
        Unload("gone"),
        Unload("bad"),
        Adopt("stranger", "/lora/stranger"),
        Load(policies["new"]),
    ]


def test_the_right_name_from_the_wrong_path_is_replaced() -> None:
    live = policy("p", PolicyState.LIVE)
    assert plan({"p": live}, {"p": "/other"}) == [Unload("p"), Load(live)]


NAMES = st.sampled_from("abcde")


@given(st.dictionaries(NAMES, st.sampled_from(PolicyState)), st.dictionaries(NAMES, st.booleans()))
def test_one_plan_is_enough(states: dict[str, PolicyState], holds: dict[str, bool]) -> None:
    policies = {name: policy(name, state) for name, state in states.items()}
    held = {name: f"/lora/{name}" if right else "/other" for name, right in holds.items()}
    for action in plan(policies, held):
        carry_out(action, policies, held)
    assert plan(policies, held) == []


def carry_out(action: Action, policies: dict[str, Policy], held: dict[str, str]) -> None:
    match action:
        case Load(wanted):
            assert wanted.name not in held, "vLLM refuses a name that it holds"
            held[wanted.name] = wanted.path
        case Unload(name):
            del held[name]
        case Adopt(name, path):
            policies[name] = Policy(name, path, None, None, None, announced_at=0.0, state=PolicyState.LIVE)
