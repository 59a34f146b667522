"""A fleet's config: every mistake with its line and what to do, and no secret in it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import SettingsError
from trainer_client.jobs.config import FleetConfig, read, seconds
from trainer_client.jobs.template import template

GOOD = """\
name: math-r1
bucket: me/runs
model: Qwen/Qwen2.5-Math-1.5B
trainer:
  image: ghcr.io/me/trainer:1
  command: [python, train.py]
"""


def _read(tmp_path: Path, text: str) -> FleetConfig:
    path = tmp_path / "fleet.yaml"
    path.write_text(textwrap.dedent(text))
    return read(path)


def _mistakes(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(SettingsError) as raised:
        _read(tmp_path, text)
    return str(raised.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_short_config_is_enough(tmp_path: Path) -> None:
    config = _read(tmp_path, GOOD)
    assert (config.mount, config.replicas.count, config.network) == ("/lora", 2, "exposed")
    assert config.lora_args()[:3] == ["--enable-lora", "--max-loras", "6"]


def test_the_template_explains_every_field_and_can_be_read(tmp_path: Path) -> None:
    config = _read(tmp_path, template())
    assert config.replicas.timeout == 6 * 3600
    assert config.trainer.command == ("python", "train.py")
    text = template()
    for model in (FleetConfig, type(config.replicas), type(config.trainer)):
        for name, field in model.model_fields.items():
            assert f"{name}:" in text
            assert field.description, f"{name} is not documented"
            assert field.description.split()[0] in text


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("max_stalenes: 4", "fleet.yaml:7: max_stalenes is not a field; did you mean max_staleness?"),
        ("zzz: 4", "fleet.yaml:7: zzz is not a field; remove it"),
        ("max_staleness: -1", "fleet.yaml:7: max_staleness: input should be greater than or equal to 0"),
        ("network: fast", "fleet.yaml:7: network: input should be 'exposed' or 'group'"),
        ("mount: lora", "fleet.yaml:7: mount is not an absolute path below /; give one such as /lora"),
        (
            "poll: soon",
            "fleet.yaml:7: poll is not a time; give seconds, or a number with a unit",
        ),
        (
            "labels: {a b: c}",
            "fleet.yaml:7: labels has a b=c; both may hold letters, digits, - and _",
        ),
        ("labels: {lora-sync-run: c}", "fleet.yaml:7: labels has lora-sync-run, which lora-sync sets itself"),
        ("replicas: {image: vllm/vllm-openai}", "fleet.yaml:7: replicas.image has no tag; name the version"),
        ("replicas: {flavour: t4-small}", "fleet.yaml:7: replicas.flavour is not a field; did you mean flavor?"),
        ("name: twice", "fleet.yaml:7: name is set twice; remove one"),
        (
            "lora_rank: 1024",
            "fleet.yaml:1: the config: rank 1024 cannot be served: vLLM takes",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_and_what_to_do(tmp_path: Path, line: str, mistake: str) -> None:
    (told,) = _mistakes(tmp_path, GOOD + line + "\n")
    assert told.startswith(mistake)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    told = _mistakes(
        tmp_path,
        """\
        name: Math R1
        model: m
        replicas:
          count: 0
          args:
            - --max-model-len
            - hf_abcdefghijklmnopqrstuv
        trainer:
          command: []
        """,
    )
    starts = [line.partition(" ")[0] + " " + line.split()[1].rstrip(":") for line in told]
    assert sorted(starts) == [
        "fleet.yaml:1: bucket",
        "fleet.yaml:1: name",
        "fleet.yaml:4: replicas.count",
        "fleet.yaml:7: replicas.args.1",
        "fleet.yaml:8: trainer.image",
        "fleet.yaml:9: trainer.command",
    ]
    assert "hf_abc" not in "\n".join(told), "a token is not printed even if it was put in the wrong place"


def test_paths_begin_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    assert _read(tmp_path, GOOD + "  code: src\n").trainer.code == tmp_path / "src"
    (told,) = _mistakes(tmp_path, GOOD + "  code: other\n")
    assert told == "fleet.yaml:7: trainer.code is no directory: there is no other"


@pytest.mark.parametrize(
    "part",
    [
        "environment: {HF_TOKEN: x}",
        "environment: {WANDB_API_KEY: x}",
        "environment: {A: hf_abcdefghijklmnopqrstuv}",
        "secrets: [hf_abcdefghijklmnopqrstuv]",
        "secrets: [A=b]",
        "setup: export HF_TOKEN=hf_abcdefghijklmnopqrstuv",
    ],
)
def test_a_secret_in_the_config_is_refused(tmp_path: Path, part: str) -> None:
    (told,) = _mistakes(tmp_path, GOOD + f"  {part}\n")
    assert told.startswith("fleet.yaml:7: trainer.")
    assert "hf_abc" not in told


def test_numbers_may_be_values_of_variables(tmp_path: Path) -> None:
    config = _read(tmp_path, GOOD + "  environment: {OMP_NUM_THREADS: 8, TOKENIZERS_PARALLELISM: 'false'}\n")
    assert config.trainer.environment == {"OMP_NUM_THREADS": "8", "TOKENIZERS_PARALLELISM": "false"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there are no fields"),
        ("- a", "there are no fields"),
        ("a: [", "this is not YAML"),
        ("a: !b c", "not YAML"),
    ],
)
def test_what_is_not_a_config_is_told(tmp_path: Path, text: str, told: str) -> None:
    assert told in _mistakes(tmp_path, text)[0]


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot be read .*lora-sync jobs init"):
        read(tmp_path / "none.yaml")


@given(number=st.integers(1, 10**6), unit=st.sampled_from(["", "s", "m", "h", "d"]))
def test_times_are_read_with_their_units(number: int, unit: str) -> None:
    factor = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert seconds(f"{number}{unit}") == number * factor
    assert seconds(number) == number
