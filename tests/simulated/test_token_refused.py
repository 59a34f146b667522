"""A replica refuses the proxy's token: who does is said, a new token is used at once, and no rollout pays for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulated.checks import BASE, WaitingProxy, right_tokens
from tests.simulated.conftest import Adapters
from tests.simulated.flaky import FlakyReplica
from tests.support.proxies import RunningProxy
from tests.support.replicas import SimulatedReplica, simulators, wait_until

OLD, NEW = "hf_the_old_one", "hf_the_new_one"


def _reason(proxy: RunningProxy) -> str:
    reason: str = proxy.replicas()[0]["reason"]
    return reason


def test_the_key_of_vllm_is_told_from_a_gate() -> None:
    with SimulatedReplica(api_key=NEW) as replica, WaitingProxy(replica.url, HF_TOKEN=OLD) as proxy:
        wait_until(lambda: "401" in _reason(proxy), what="it says why")
        assert "vLLM itself asks for a key (--api-key)" in _reason(proxy)
        assert proxy.states() == ["joining"]
        assert OLD not in proxy.log() + _reason(proxy)


@pytest.mark.parametrize(("how", "said"), [("refused", "does not take the proxy's token"), ("barred", "may not come")])
def test_a_gate_that_shuts_takes_the_replica_out(how: str, said: str, adapter: Adapters) -> None:
    with (
        FlakyReplica() as gated,
        SimulatedReplica() as other,
        RunningProxy(gated.url, other.url, HF_TOKEN=OLD) as proxy,
    ):
        for call in ("POST /v1/completions", "GET /health", "GET /v1/models", "POST /v1/load_lora_adapter"):
            gated.spoil(call, how)
        for seed in range(8):
            assert proxy.complete("sim", prompt=[seed]) == right_tokens(BASE, prompt=[seed])
        proxy.wait_states("down", "ready")
        assert said in _reason(proxy) and OLD not in _reason(proxy)
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        gated.heal()
        proxy.wait_states("ready", "ready")
        assert OLD not in proxy.log()


def test_alone_it_is_said_to_the_client() -> None:
    with FlakyReplica() as gated, RunningProxy(gated.url, HF_TOKEN=OLD, PROXY_WAIT_READY_S="0.5") as proxy:
        gated.spoil("POST /v1/completions", "refused")
        gated.spoil("GET /health", "refused")
        answer = proxy.completion("sim")
        assert answer.status_code in (502, 503), "not the 401 of somebody else's token"
        assert gated.url in answer.text and "token" in answer.text and OLD not in answer.text


def test_a_token_that_is_renewed_is_read_from_its_file(tmp_path: Path, adapter: Adapters) -> None:
    file = tmp_path / "token"
    file.write_text(f"{OLD}\n")
    with (
        simulators(1, api_key=OLD) as (replica,),
        RunningProxy(replica.url, HF_TOKEN="", PROXY_TOKEN_FILE=str(file)) as proxy,
    ):
        assert proxy.load("policy-v1", adapter(1)).status_code == 200
        port = int(replica.url.rpartition(":")[2])
        replica.stop()
        file.write_text(f"{NEW}\n")
        with SimulatedReplica(api_key=NEW, port=port):
            wait_until(lambda: proxy.completion("policy-v1").status_code == 200, what="it serves with the new token")
            assert proxy.complete("policy-v1") == right_tokens(adapter(1))
            assert OLD not in proxy.log() and NEW not in proxy.log()
