"""`lora-sync jobs`: a fleet on Hugging Face Jobs, from nothing to the trainer's end and back to nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from proxy.errors import SettingsError
from trainer_client.errors import JobsError
from trainer_client.jobs import state
from trainer_client.jobs.beside import run_beside
from trainer_client.jobs.config import FleetConfig, read
from trainer_client.jobs.ending import cancel_all, must_be_complete
from trainer_client.jobs.health import HealthProbe
from trainer_client.jobs.hub import Hub, secret_values
from trainer_client.jobs.launch import FLEET_LABEL, TOKEN, Role, Run, Seat, all_calls, bucket_call, code_call, job_call
from trainer_client.jobs.plan import Cancel, End, Seen, Start, rescale
from trainer_client.jobs.preflight import Finding, config_findings
from trainer_client.jobs.preflight import preflight as look_ahead
from trainer_client.jobs.screen import Row, Screen, screen, table
from trainer_client.jobs.signals import stopping
from trainer_client.jobs.target import find
from trainer_client.jobs.template import template
from trainer_client.jobs.watch import Watch
from trainer_client.tables import show

EXIT_FAILED = 1

LAST_LINES = 20
"""Lines of a failed Job's log that are shown: enough for a traceback's end."""

LATE_START_S = 3.0
"""For `down` after a crash of `up`: a call that was on its way to the Hub may still start a Job."""

app = typer.Typer(
    no_args_is_help=True, help="Run replicas, and a trainer with the proxy beside it, on Hugging Face Jobs."
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The fleet's config; `init` writes one.")]
Fleet = Annotated[
    str | None,
    typer.Argument(metavar="FLEET", help="Name of the fleet, or its config. Default: the one started from here."),
]
Namespace = Annotated[
    str | None, typer.Option(metavar="NAME", help="Account or organization of the Jobs, where FLEET is a name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(short_help="Write a config to start from.")
def init(
    path: Annotated[str, typer.Argument(metavar="FILE", help="Where to write; - prints.")] = "fleet.yaml",
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a config to start from, with every field explained."""
    if path == "-":
        typer.echo(template(), nl=False)
        return
    try:
        with Path(path).open("w" if force else "x") as file:
            file.write(template())
    except FileExistsError as error:
        raise SettingsError(f"{path} is there already; give another name, or --force to write over it") from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error.strerror})") from error
    typer.echo(f"{path} is written; fill in what is marked (required), then: lora-sync jobs preflight {path}")


@app.command(short_help="Bring a fleet up until its trainer ends.")
def up(
    path: Config,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print every call to the Hub and make none.")] = False,
    as_json: AsJson = False,
) -> None:
    """Bring a fleet up, watch it until its trainer ends, and leave nothing running.

    Makes the bucket, starts the replicas, waits for every /health, then starts the trainer with the proxy beside it. A
    replica that dies is replaced. At the trainer's end, at a failure and on Ctrl-C every Job is canceled. Exit status:
    0 if the trainer ended well, 1 if not, 2 if the config cannot work, 130 after Ctrl-C.
    """
    config = read(path)
    if wrong := [finding for finding in config_findings(config) if not finding.ok]:
        raise SettingsError("\n".join(f"{path}: {finding.text}" for finding in wrong))
    if dry_run:
        _print_calls(config, as_json)
        return
    hub = Hub(config.namespace)
    secrets = secret_values({TOKEN, *config.replicas.secrets, *config.trainer.secrets})
    if alive := hub.jobs({FLEET_LABEL: config.name}, alive=True):
        raise JobsError(
            f"{config.name} is up already ({', '.join(map(str, alive))}); "
            f"end it with `lora-sync jobs down {config.name}`"
        )
    hub.create_bucket(bucket_call(config))
    run = Run.new(config.name, hub.namespace)
    if code := code_call(config, run):
        hub.copy_code(code)
    record = state.Record(config.name, hub.namespace, run.id, str(path.resolve()), os.getpid())
    with stopping() as stopped, screen(as_json=as_json) as shown:
        try:
            state.remember(record)
        except OSError as error:
            shown.say(f"{state.folder()} cannot be written ({error.strerror}), so other commands need the fleet's name")
        shown.say(f"run {run.id} in {hub.namespace}; `lora-sync jobs down {config.name}` ends it from anywhere")
        end, ended = Watch(hub, config, run, secrets=secrets, screen=shown).run(stopped.event)
        if ended.complete:
            state.forget(config.name, hub.namespace)
        _tell_end(hub, end, shown, as_json)
    must_be_complete(ended)
    if stopped.by:
        raise typer.Exit(128 + stopped.by)
    if not end.ok:
        raise typer.Exit(EXIT_FAILED)


@app.command(short_help="Show the Jobs of a fleet.")
def status(fleet: Fleet = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show the Jobs of a fleet that are not over, and how they are. Exit status: 1 if there is none."""
    target = find(fleet, namespace)
    jobs = target.jobs()
    with HealthProbe() as probe:
        health = probe.ask(job for job in jobs if job.seat.role is Role.REPLICA)
    rows = [Row.of(job, health.get(job.id, "")) for job in jobs]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
    elif rows:
        show(table(rows))
    else:
        typer.echo(f"{target.name}: no Job is up")
    if not rows:
        raise typer.Exit(EXIT_FAILED)


@app.command(short_help="Print the log of a Job.")
def logs(
    fleet: Fleet = None,
    job: Annotated[str, typer.Option(metavar="NAME", help="trainer, replica-2, ...; or all.")] = "trainer",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the Job ends.")] = False,
    tail: Annotated[int, typer.Option(min=1, metavar="N", help="How many lines to begin with.")] = 100,
    namespace: Namespace = None,
) -> None:
    """Print the log of a fleet's newest Job of a name, also after its end."""
    target = find(fleet, namespace)
    newest = {str(one.seat): one for one in target.jobs(alive=False)}
    wanted = list(newest.values()) if job == "all" else [newest[job]] if job in newest else []
    if not wanted:
        raise JobsError(f"{target.name} has no Job {job}; there is: {', '.join(sorted(newest)) or 'none'}")
    if follow and len(wanted) > 1:
        raise SettingsError("--follow takes one Job at a time; name it with --job")
    for one in wanted:
        prefix = f"{one.seat} | " if len(wanted) > 1 else ""
        lines = target.hub.follow(one, tail) if follow else target.hub.last_lines(one, tail)
        for line in lines:
            typer.echo(prefix + line)


@app.command(short_help="Start replicas, or cancel some.")
def scale(
    count: Annotated[int, typer.Argument(min=1, max=64, metavar="N", help="How many replicas there should be.")],
    fleet: Fleet = None,
    as_json: AsJson = False,
) -> None:
    """Start replicas, or cancel those with the highest numbers, while everything runs.

    The proxy finds new ones by itself and moves the rollouts of those that go. `up`, where it runs, goes by the new
    number. New replicas are started from the config, so FLEET is the config, or the fleet was started from here.
    """
    target = find(fleet)
    if target.config is None:
        raise SettingsError(f"the config of {target.name} is not known here; give its file instead of its name")
    config, hub = target.config, target.hub
    jobs = target.jobs()
    if not jobs:
        raise JobsError(f"{target.name} is not up; `lora-sync jobs up` starts it")
    secrets = secret_values(set(config.replicas.secrets))
    run = Run(config.name, hub.namespace, max(jobs, key=lambda one: one.created).run)
    actions = rescale(count, Seen(tuple(one for one in jobs if one.run == run.id)))
    for action in actions:
        if isinstance(action, Start):
            action_job = hub.run(job_call(config, run, action.seat), secrets)
        else:
            hub.cancel(action_job := action.job)
        if not as_json:
            typer.echo(f"{'started' if isinstance(action, Start) else 'canceled'} {action_job}")
    if as_json:
        changed = [{"action": type(one).__name__.lower(), "name": str(_seat(one))} for one in actions]
        typer.echo(json.dumps({"replicas": count, "changed": changed}))
    elif not actions:
        typer.echo(f"{target.name} has {count} replicas already")


@app.command(short_help="Cancel every Job of a fleet.")
def down(fleet: Fleet = None, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Cancel every Job of a fleet, of whichever run, found by its label alone; wait until none is left."""
    target = find(fleet, namespace)
    ended = cancel_all(
        target.hub,
        {FLEET_LABEL: target.name},
        say=(lambda text: None) if as_json else typer.echo,
        at_least_s=LATE_START_S if target.crashed() else 0.0,
    )
    must_be_complete(ended)
    state.forget(target.name, target.hub.namespace)
    if as_json:
        typer.echo(json.dumps({"canceled": [{"name": str(job.seat), "job": job.id} for job in ended.canceled]}))
    elif not ended.canceled:
        typer.echo(f"{target.name}: no Job was up")


@app.command(short_help="Look for what would go wrong.")
def preflight(path: Config, as_json: AsJson = False) -> None:
    """Look for what would go wrong, before it costs anything. Exit status: 1 if something would.

    Token, secrets, bucket (a small file is written and removed), ports, mounts and slots: of the Jobs that the config
    would start, and of those of this fleet that run.
    """
    findings = look_ahead(read(path))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    for finding in () if as_json else findings:
        typer.echo(_finding_line(finding))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(EXIT_FAILED)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def beside(command: Annotated[list[str], typer.Argument(metavar="COMMAND")]) -> None:
    """Inside the trainer Job: run the proxy, and COMMAND once it is ready. Ends with COMMAND's status."""
    raise typer.Exit(run_beside(command))


def _print_calls(config: FleetConfig, as_json: bool) -> None:
    calls = all_calls(config, Run.new(config.name, config.namespace or "YOUR-ACCOUNT"))
    if as_json:
        typer.echo(json.dumps([call.as_json() for call in calls]))
    else:
        typer.echo("\n".join(map(str, calls)))


def _tell_end(hub: Hub, end: End, shown: Screen, as_json: bool) -> None:
    if end.job is not None:
        try:
            lines = hub.last_lines(end.job, LAST_LINES)
        except JobsError as error:
            lines = [str(error)]
        for line in lines:
            shown.say(f"{end.job.seat} | {line}")
    if as_json:
        typer.echo(json.dumps({"event": "end", "ok": end.ok, "text": end.why}))
    else:
        shown.say(f"{end.why}; nothing is running any more" if end.ok else f"failed: {end.why}")


def _finding_line(finding: Finding) -> str:
    return f"{'ok ' if finding.ok else 'NOT OK'}  {finding.what}: {finding.text}"


def _seat(action: Start | Cancel) -> Seat:
    return action.seat if isinstance(action, Start) else action.job.seat
