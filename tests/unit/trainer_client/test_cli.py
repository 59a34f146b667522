"""The `lora-sync` command: output for people and for scripts, one sentence and a status when it fails."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.contract import LoadReport
from proxy.simulator.adapters import write_adapter
from tests.support.adapters import write_broken
from tests.support.fake_proxy import Answer, FakeProxy, refusal, report
from tests.support.merged import merging_by_seed
from trainer_client import waiting
from trainer_client.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `lora-sync` in this process; returns status, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lora-sync", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        output = capsys.readouterr()
        return int(stopped.value.code or 0), output.out, output.err

    return call


def publish_arguments(proxy: FakeProxy, tmp_path: Path, *, step: int = 40) -> list[str]:
    adapter = write_adapter(tmp_path / "adapter", seed=step)
    options = {
        "--step": step,
        "--store": tmp_path / "store",
        "--proxy": proxy.url,
        "--run": "run",
        "--max-staleness": 1,
    }
    return ["publish", str(adapter), *(str(part) for option in options.items() for part in option)]


def test_publishing_prints_the_name_that_rollouts_use(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        status, out, _ = run(*publish_arguments(proxy, tmp_path))
        assert status == 0
        (name,) = proxy.live
        assert out.startswith(f"{name} is live on 1 replica (step 40; seconds: ")


def test_a_policy_that_was_live_before_is_said_to_be(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        known = LoadReport(policy="run-v1", status="live", seconds=0.0)
        proxy.script.append(Answer(200, known.model_dump()))
        assert " is live already (step 40; " in run(*publish_arguments(proxy, tmp_path))[1]


def test_publishing_for_a_script_prints_json(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        status, out, _ = run(*publish_arguments(proxy, tmp_path), "--json")
        policy = json.loads(out)
        assert status == 0
        assert policy["name"] in proxy.live
        assert (policy["version"], policy["step"], policy["report"]["status"]) == (1, 40, "live")
        assert sorted(policy["timings_s"]) == ["announce", "check", "gather", "retire", "store"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_publication_that_waits_says_on_stderr_what_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.setattr(waiting, "FIRST_S", 0.05)
    with FakeProxy() as proxy:
        live = report("run-v1", status="live").model_dump()
        proxy.answers = {1: Answer(200, live), 2: Answer(200, live, delay_s=1.0)}
        assert run(*publish_arguments(proxy, tmp_path), *options)[2] == "", "it takes no time"
        status, out, err = run(*publish_arguments(proxy, tmp_path), *options)
    assert (status, out.count("\n")) == (0, 1)
    assert err.startswith("lora-sync: run-v1-") and " is not served after 0 s: no replica has been asked for it" in err


def test_a_refusal_of_the_proxy_is_one_sentence_and_status_1(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        proxy.script.append(refusal(409, "no free slot"))
        status, out, err = run(*publish_arguments(proxy, tmp_path))
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"lora-sync: {proxy.url} did not load run-v1-")
        assert "no free slot" in err


def test_an_adapter_that_cannot_be_served_is_status_2(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        arguments = publish_arguments(proxy, tmp_path)
        (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
        status, _, err = run(*arguments)
        assert status == 2
        assert err.count("\n") == 1
        assert "peft_type is missing" in err


def test_a_proxy_without_tls_is_asked_once_by_https(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        arguments = publish_arguments(proxy, tmp_path)
        arguments[arguments.index("--proxy") + 1] = proxy.url.replace("http", "https")
        status, _, err = run(*arguments)
    assert status == 1 and "trying again" not in err
    assert "begins as it should, with http:// or https://" in err


def test_a_lower_step_is_status_2_unless_allowed(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        assert run(*publish_arguments(proxy, tmp_path, step=40))[0] == 0
        status, _, err = run(*publish_arguments(proxy, tmp_path, step=39))
        assert (status, "--allow-rewind" in err) == (2, True)
        assert run(*publish_arguments(proxy, tmp_path, step=39), "--allow-rewind")[0] == 0


def test_a_store_may_be_a_url_that_replicas_see_elsewhere(run: Run, tmp_path: Path) -> None:
    with FakeProxy(sees_files=False) as proxy:
        arguments = publish_arguments(proxy, tmp_path)
        arguments[arguments.index("--store") + 1] = f"memory://{tmp_path.name}"
        assert run(*arguments)[0] == 2
        assert run(*arguments, "--mount", "/lora")[0] == 0
        (name,) = proxy.live
        assert proxy.live[name] == f"/lora/run/{name}"


# policies


def test_policies_are_listed_one_a_line(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        for step in (1, 2, 3):
            run(*publish_arguments(proxy, tmp_path, step=step))
        proxy.leased.add(next(iter(proxy.live)))
        status, out, _ = run("policies", "--proxy", proxy.url)
        header, *rows = [line.split() for line in out.splitlines()]
        assert status == 0
        assert header == ["name", "state", "version", "step", "leases", "held", "by", "why"]
        assert [row[:2] for row in rows] == [
            *([name, "live"] for name in proxy.live),
            [*sorted(proxy.retired), "retired"],
        ]
        assert rows[0][4:] == ["1", "replica-1:8000"]
        status, out, _ = run("policies", "--proxy", proxy.url, "--json")
        assert [policy["name"] for policy in json.loads(out)] == [row[0] for row in rows]


@pytest.mark.parametrize(("which", "left"), [("run", ["other-v1-00000000"]), ("ALL", []), ("ru", None), ("all", None)])
def test_a_run_that_has_ended_is_cleaned_up_by_hand(
    run: Run, tmp_path: Path, which: str, left: list[str] | None
) -> None:
    with FakeProxy() as proxy:
        run(*publish_arguments(proxy, tmp_path))
        proxy.live["other-v1-00000000"] = "/elsewhere"
        before = list(proxy.live)
        status, out, _ = run("policies", "--proxy", proxy.url, "--retire", which)
        assert status == 0
        assert list(proxy.live) == (before if left is None else left)
        assert out.count("retired") == len(before) - len(proxy.live)


def test_a_proxy_that_is_not_there_is_one_sentence_and_status_1(run: Run) -> None:
    with FakeProxy(listening=False) as proxy:
        status, _, err = run("policies", "--proxy", proxy.url)
        assert (status, err.count("\n")) == (1, 1)
        assert f"{proxy.url} did not answer GET /proxy/policies" in err


def test_what_cannot_be_served_is_merged_if_it_is_asked_for(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy, merging_by_seed():
        arguments = publish_arguments(proxy, tmp_path)
        arguments[1] = str(write_broken(tmp_path / "dora", "dora"))
        assert run(*arguments)[0] == 2
        status, out, _ = run(*arguments, "--merge", "--json")
        facts = json.loads(out)
        assert (status, facts["merged"], facts["model"]) == (0, True, "base")
        assert [reload.name for reload in proxy.reloads] == [facts["name"]]
        assert "merged, as base" in run(*arguments, "--merge")[1]


# check


def test_an_adapter_that_can_be_served_is_status_0(run: Run, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    said = f"{adapter}: adapter: it goes as it is, as LoRA beside the base model\n"
    assert run("check", str(adapter)) == (0, said, "")


def test_an_adapter_that_cannot_is_status_2_with_every_reason(run: Run, tmp_path: Path) -> None:
    adapter = write_broken(tmp_path / "adapter", "dora")
    status, out, _ = run("check", str(adapter))
    assert (status, "merged: it goes only as a whole model with it merged in" in out.splitlines()[0]) == (2, True)
    assert "use_dora is set" in out.splitlines()[1]
    status, out, _ = run("check", str(tmp_path / "nowhere"), "--json")
    facts = json.loads(out)
    assert (status, facts["way"], facts["meaning"]) == (2, "broken", "it goes not at all")
    assert "cannot be read" in facts["reasons"][0]


def test_the_rank_of_the_fleet_counts_where_a_proxy_is_named(run: Run, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1, rank=16)
    with FakeProxy() as proxy:
        proxy.max_lora_rank = 8
        assert run("check", str(adapter))[0] == 0
        status, out, _ = run("check", str(adapter), "--proxy", proxy.url)
        assert (status, "rank 16 is above 8" in out) == (2, True)


def test_a_fleet_without_lora_gets_every_adapter_merged(run: Run, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    with FakeProxy() as proxy:
        proxy.dtype = "torch.bfloat16"
        status, out, _ = run("check", str(adapter), "--proxy", proxy.url, "--json")
        facts = json.loads(out)
        assert (status, facts["way"], facts["serves_lora"]) == (2, "merged", False)
        assert "--enable-lora" in facts["reasons"][0]
        proxy.max_lora_rank = 16
        status, out, _ = run("check", str(adapter), "--proxy", proxy.url, "--json")
        facts = json.loads(out)
        assert (status, facts["way"], facts["max_lora_rank"], facts["dtype"]) == (0, "adapter", 16, "torch.bfloat16")


def test_a_run_that_the_proxy_does_not_know_retires_nothing_and_is_said_to(run: Run) -> None:
    with FakeProxy() as proxy:
        status, _, err = run("policies", "--proxy", proxy.url, "--retire", "math-r9")
    assert (status, err) == (0, "lora-sync: the proxy knows no policy of math-r9\n")


# gc


def test_a_store_that_is_not_there_holds_nothing_and_is_not_made(run: Run, tmp_path: Path) -> None:
    store = tmp_path / "tpyo"
    with FakeProxy() as proxy:
        for options, said in (((), f"nothing to remove: {store}/run is not there\n"), (("--json",), "[]\n")):
            assert run("gc", "--store", str(store), "--proxy", proxy.url, "--run", "run", *options)[:2] == (0, said)
    assert not store.exists()


def test_garbage_is_shown_and_then_removed(run: Run, tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        assert run(*publish_arguments(proxy, tmp_path))[0] == 0
        orphan = write_adapter(tmp_path / "store" / "run" / "run-v9-abcdef01", seed=1)
        arguments = ["gc", "--store", str(tmp_path / "store"), "--proxy", proxy.url, "--run", "run", "--min-age", "0"]
        status, out, _ = run(*arguments, "--dry-run")
        assert status == 0
        assert out.splitlines()[1].split()[0] == orphan.name
        assert out.splitlines()[-1].startswith("1 folders, ")
        assert orphan.exists()
        (removed,) = json.loads(run(*arguments, "--json")[1])
        assert (removed["folder"], removed["removed"], orphan.exists()) == (orphan.name, True, False)
        assert run(*arguments)[1] == "nothing to remove\n"


def test_vllm_arguments_fit_into_a_shell(run: Run) -> None:
    status, out, _ = run("vllm-args", "--max-staleness", "4", "--rank", "12")
    assert (status, out) == (0, "--enable-lora --max-loras 6 --max-cpu-loras 12 --max-lora-rank 16\n")


def test_vllm_arguments_for_an_adapter_as_json(run: Run, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, seed=1, rank=4)
    status, out, _ = run("vllm-args", "--max-staleness", "0", "--adapter", str(adapter), "--json")
    assert status == 0
    assert json.loads(out)[-2:] == ["--max-lora-rank", "8"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["vllm-args", "--max-staleness", "4"],
        ["vllm-args", "--max-staleness", "4", "--rank", "600"],
        ["vllm-args", "--max-staleness", "-1", "--rank", "8"],
        ["vllm-args", "--max-staleness", "4", "--adapter", "nowhere"],
        ["publish"],
        ["gc"],
        ["check"],
        ["policies", "--proxy", "localhost"],
        ["unknown"],
    ],
)
def test_input_that_cannot_work_is_status_2_without_a_traceback(run: Run, arguments: list[str]) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert "Traceback" not in err


def test_the_version_is_printed(run: Run) -> None:
    status, out, _ = run("--version")
    assert (status, out.split()[0]) == (0, "lora-sync")


@pytest.mark.parametrize(
    "command", [[], ["publish"], ["policies"], ["check"], ["gc"], ["vllm-args"], ["status"], ["top"]]
)
def test_every_command_has_help(run: Run, command: list[str]) -> None:
    status, out, _ = run(*command, "--help")
    assert status == 0
    assert "Usage: lora-sync" in out


@pytest.mark.parametrize(("options", "to"), [((), "/dev/full"), (("--json",), "/dev/full"), ((), None)])
def test_output_that_cannot_be_written_is_one_sentence(options: tuple[str, ...], to: str | None) -> None:
    """Nor is it missed where there is nothing to write to."""
    with FakeProxy() as proxy:
        command = [sys.executable, "-c", MAIN, "policies", "--proxy", proxy.url, *options]
        shell = f"exec {shlex.join(command)} {f'>{to}' if to else '>&-'}"
        ended = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=30)
    no_space = "lora-sync: its output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == ((1, no_space) if to else (0, ""))


MAIN = "from trainer_client.cli import main; main()"


def test_ctrl_c_is_one_line_and_status_130(tmp_path: Path) -> None:
    with FakeProxy() as proxy:
        proxy.script.append(Answer(200, delay_s=60.0))
        command = [sys.executable, "-c", MAIN, *publish_arguments(proxy, tmp_path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 15
        while not proxy.loads and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert err == "lora-sync: interrupted; running the same command again is safe\n"
