"""The `lora-sync` command: publish an adapter from a shell, and print vLLM's arguments."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy.errors import ArtifactError, LoraSyncError, SettingsError
from trainer_client import slots
from trainer_client.client import TrainerClient
from trainer_client.errors import PublishError, RewindError, UnservableError
from trainer_client.policies import Policy

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

BAD_INPUT = (SettingsError, ArtifactError, UnservableError, RewindError)

app = typer.Typer(
    help="Publish LoRA weights to every vLLM replica behind lora-sync-proxy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

MaxStaleness = Annotated[
    int, typer.Option(min=0, metavar="K", help="How many versions a rollout may lag behind the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lora-sync {version('lora-sync-proxy')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def publish(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory that peft saved the adapter to.")],
    step: Annotated[int, typer.Option(min=0, metavar="N", help="Optimizer step that the weights come from.")],
    store: Annotated[Path, typer.Option(metavar="DIR", help="Directory that the replicas see under the same path.")],
    proxy: Annotated[str, typer.Option(metavar="URL", help="Where lora-sync-proxy listens.")],
    run: Annotated[str, typer.Option(metavar="NAME", help="Name of the training run.")],
    max_staleness: MaxStaleness,
    allow_rewind: Annotated[
        bool, typer.Option("--allow-rewind", help="Take a step that is lower than the newest policy's.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Publish an adapter, and wait until every replica serves it.

    Prints the name that rollouts put into "model". Publishing the same adapter again is safe: it keeps its name.
    """
    with _connected(proxy, store=store, run=run, max_staleness=max_staleness) as client:
        policy = client.publish(directory, step, allow_rewind=allow_rewind)
    typer.echo(json.dumps(_as_json(policy)) if as_json else _sentence(policy))


@app.command("vllm-args")
def vllm_args(
    max_staleness: MaxStaleness,
    rank: Annotated[int | None, typer.Option(min=1, metavar="R", help="Largest rank of the adapters.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of an adapter to take the rank from.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the arguments that vLLM needs to hold every policy of a run.

    Use it as: vllm serve MODEL $(lora-sync vllm-args --max-staleness 4 --rank 16)
    """
    if (rank is None) == (adapter is None):
        raise typer.BadParameter("Give either --rank or --adapter.")
    arguments = slots.vllm_args(max_staleness=max_staleness, rank=slots.rank_of(adapter or rank))
    typer.echo(json.dumps(arguments) if as_json else shlex.join(arguments))


def main() -> None:
    """Run the command. Exit status: 0 done, 1 failed, 2 the input cannot work, 130 interrupted."""
    try:
        app(prog_name="lora-sync")
    except LoraSyncError as error:
        print(f"lora-sync: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED)
    except SystemExit as stopped:
        # typer turns Ctrl-C into this status without a word
        if stopped.code == EXIT_INTERRUPTED:
            print("lora-sync: interrupted; publishing the same adapter again is safe", file=sys.stderr)
        raise


@contextmanager
def _connected(proxy: str, **options: Any) -> Iterator[TrainerClient]:
    client = TrainerClient(proxy, **options)
    try:
        yield client
    finally:
        # After Ctrl-C a publication may go on. It is not waited for: the adapter is still there to be published again.
        with suppress(PublishError):
            client.close(timeout_s=0)


def _as_json(policy: Policy) -> dict[str, object]:
    return {
        "name": policy.name,
        "version": policy.version,
        "step": policy.step,
        "digest": policy.digest,
        "path": str(policy.path),
        "timings_s": vars(policy.timings),
        "report": policy.report.model_dump(),
    }


def _sentence(policy: Policy) -> str:
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in vars(policy.timings).items())
    replicas = sum(replica.status == "loaded" for replica in policy.report.replicas)
    where = f"live on {replicas} replica{'s' * (replicas != 1)}" if replicas else "live already"
    return f"{policy.name} is {where} (step {policy.step}; seconds: {phases})"
