"""`lora-sync nccl`: print what NCCL should run with. `lora-sync nccl test`: find the size that hangs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Annotated

import typer

from proxy.errors import SettingsError
from trainer_client.nccl.advice import NcclAdvice, advise, assignments, nccl_variables
from trainer_client.nccl.probe import NO_BINDING, probe
from trainer_client.nccl.sweep import (
    DEADLINE_S,
    DEVICES,
    MAX_BYTES,
    MIN_BYTES,
    Measurement,
    Outcome,
    Sweep,
)
from trainer_client.nccl.topology import Launcher, Topology
from trainer_client.nccl.user import user_settings

EXIT_NOT_GOOD = 1

KB = 1024

WHAT_HAPPENS = {Outcome.HANG: "hangs", Outcome.WRONG: "gives wrong values", Outcome.FAILED: "fails"}

app = typer.Typer()

Ray = Annotated[bool, typer.Option("--ray", help="For Ray actors, which see one GPU each.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    as_json: AsJson = False,
    export: Annotated[bool, typer.Option("--export", help='For a shell: eval "$(lora-sync nccl --export)".')] = False,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="For vLLM's command line: env $(lora-sync nccl --vllm) vllm serve ...")
    ] = False,
    ray: Ray = False,
) -> None:
    """Print the NCCL settings that this host asks for, and why. Sets nothing by itself.

    With --ray alone it prints the runtime_env: ray job submit --runtime-env-json "$(lora-sync nccl --ray)" ...

    Run it on each host that takes part in NCCL weight sync, trainer's and vLLM's.
    """
    if context.invoked_subcommand:
        return
    if as_json + export + vllm > 1:
        raise typer.BadParameter("Give one of --json, --export and --vllm.")
    advice = advise(_topology(ray), user_settings(os.environ))
    if as_json:
        typer.echo(json.dumps(advice.as_json(), indent=2))
        return
    if not (export or vllm or ray):
        typer.echo(_text(advice))
        return
    # The answer is for another program, so people get theirs on stderr.
    for warning in advice.warnings:
        typer.echo(f"lora-sync: {warning}", err=True)
    if export:
        lines = [f"export {setting.name}={shlex.quote(setting.value)}" for setting in advice.to_set]
        typer.echo("\n".join(lines), nl=bool(lines))
    else:
        typer.echo(advice.assignments() if vllm else json.dumps(advice.runtime_env()))


@app.command(short_help="Find the size of a collective that hangs.")
def test(
    backend: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(DEVICES)}.")] = "nccl",
    ranks: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Processes; without it, one per GPU (gloo: 2).")
    ] = None,
    max_bytes: Annotated[int, typer.Option(min=MIN_BYTES, metavar="BYTES", help="Largest size.")] = MAX_BYTES,
    deadline_s: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="What one size may take before it counts as hanging.")
    ] = DEADLINE_S,
    ray: Ray = False,
    as_json: AsJson = False,
) -> None:
    """Run all-reduce, broadcast and all-gather from 4 KB to 1 GB on this host, and say which size hangs.

    It runs in the environment as it is. To see what the settings change:
    eval "$(lora-sync nccl --export)" and run it again. Needs torch. Exit status: 0 all good, 1 not.
    """
    sweep = _sweep(backend, ranks, max_bytes, deadline_s, ray)
    if not as_json:
        settings = assignments(nccl_variables(os.environ)) or "nothing set"
        typer.echo(f"{sweep.ranks} ranks over {backend}, {deadline_s:g} s for each size; NCCL: {settings}")
    measurements = []
    for measurement in sweep.run():
        measurements.append(measurement)
        if not as_json:
            typer.echo(_line(measurement))
    if as_json:
        typer.echo(json.dumps([asdict(measurement) for measurement in measurements]))
    if not (sentence := verdict(measurements)):
        return
    typer.echo(sentence, err=as_json)
    raise typer.Exit(EXIT_NOT_GOOD)


def _topology(ray: bool) -> Topology:
    topology = probe(launcher=Launcher.RAY if ray else None)
    if topology.unknown == NO_BINDING:
        raise SettingsError(f"this command reads the GPUs' topology, but {NO_BINDING}")
    return topology


def _sweep(backend: str, ranks: int | None, max_bytes: int, deadline_s: float, ray: bool) -> Sweep:
    if backend not in DEVICES:
        raise typer.BadParameter(f"{backend} is not one of {', '.join(DEVICES)}", param_hint="--backend")
    if find_spec("torch") is None:
        raise SettingsError("the test needs torch in this environment; run it where the trainer runs")
    gpus = visible_gpus(os.environ, _topology(ray)) if backend == "nccl" else ()
    wanted = ranks or (len(gpus) if backend == "nccl" else 2)
    if backend == "nccl" and not 2 <= wanted <= len(gpus):
        raise SettingsError(
            f"NCCL needs a GPU for each of at least two ranks, and this host shows {len(gpus)}: "
            "use a host with more GPUs, or try the test itself with --backend gloo"
        )
    return Sweep(wanted, backend, max_bytes=max_bytes, deadline_s=deadline_s, gpus=gpus[:wanted] if ray else ())


def visible_gpus(environ: Mapping[str, str], topology: Topology) -> tuple[str, ...]:
    """Return what CUDA may use, one entry of CUDA_VISIBLE_DEVICES each: all GPUs where it is not set."""
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return tuple(str(gpu.index) for gpu in topology.gpus)
    return tuple(part.strip() for part in chosen.split(",") if part.strip())


def _text(advice: NcclAdvice) -> str:
    topology = advice.topology
    nccl = ".".join(map(str, topology.nccl)) if topology.nccl else "not installed by pip"
    lines = [f"GPUs: {topology.gpu_names or 'none'}; launcher: {topology.launcher}; NCCL: {nccl}."]
    if not advice.to_set:
        lines.append(f"Nothing to set. {advice.decision.reason}")
    return "\n".join([*lines, *advice.warnings])


def _line(measurement: Measurement) -> str:
    start = f"{measurement.operation:<10}  {_size(measurement.bytes):>6}  {measurement.outcome:<6}"
    if measurement.outcome is Outcome.OK:
        return f"{start}  first {measurement.first_s * 1000:.1f} ms, again {measurement.again_s * 1000:.1f} ms"
    return f"{start}  {measurement.detail}"


def verdict(measurements: list[Measurement]) -> str:
    """Return one sentence on the first measurement that is not good: what, at which size. Empty if all are good."""
    failure = next((one for one in measurements if one.outcome is not Outcome.OK), None)
    if failure is None:
        return ""
    what = f"{failure.operation} {WHAT_HAPPENS[failure.outcome]}"
    if not failure.bytes:
        return f"{what} before the first size: the processes do not find each other."
    good = [one.bytes for one in measurements if one.operation == failure.operation and one.outcome is Outcome.OK]
    smaller = f"; up to {_size(max(good))} it works" if good else ""
    hint = 'Try again after: eval "$(lora-sync nccl --export)" (docs/nccl.md)'
    return f"{what} at {_size(failure.bytes)}{smaller}. {hint}"


def _size(count: int) -> str:
    for unit in ("B", "KB", "MB"):
        if count < KB:
            return f"{count} {unit}"
        count //= KB
    return f"{count} GB"
