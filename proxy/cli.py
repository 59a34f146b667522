"""The command `lora-sync-proxy`: serve (when no subcommand is named), sim, demo."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from proxy.errors import NO_OUTPUT, LoraSyncError, SettingsError

EXIT_USAGE = 64
"""sysexits.h EX_USAGE: the configuration cannot work."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One HTTP endpoint that makes N vLLM replicas behave as one server for LoRA reinforcement learning.\n\n"
    "Without a subcommand it serves: UPSTREAM_URLS=http://host1:8000,http://host2:8000 lora-sync-proxy\n\n"
    "Its settings are environment variables, such as PROXY_PORT: `python -m proxy.settings` lists them all.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"lora-sync-proxy {importlib.metadata.version('lora-sync-proxy')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        serve()


@app.command()
def serve() -> None:
    """Run the proxy. It is configured by environment variables: `python -m proxy.settings` lists them all.

    UPSTREAM_URLS or PROXY_DISCOVER (one is required), HF_TOKEN, PROXY_HOST, PROXY_PORT, PROXY_SHUTDOWN_S, ...
    """
    # The imports take most of a second, and the first process of a container gets no signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from proxy.app import serve as run
    from proxy.logs import configure
    from proxy.settings import Settings, unknown_variables

    settings = Settings.from_env()
    configure(settings.listen.log)
    for sentence in unknown_variables(os.environ):
        logging.getLogger(__name__).warning(sentence)
    run(settings)


@app.command()
def sim(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one and prints it.")
    ] = 8001,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    model: Annotated[str, typer.Option(help="Name of the base model.")] = "sim",
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters that may run in one batch.")] = 6,
    max_cpu_loras: Annotated[int, typer.Option(min=1, help="Adapters kept in memory.")] = 12,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Highest rank that is taken.")] = 64,
    max_model_len: Annotated[int, typer.Option(min=2, help="Tokens of prompt and answer together.")] = 4096,
    speed: Annotated[float, typer.Option(help="How many times faster than the default time model.")] = 1.0,
) -> None:
    """Run a pretend vLLM replica, without a GPU.

    It answers as vLLM does, with tokens that depend on the weights alone: for trying things out and for tests.
    """
    from proxy.simulator.server import run
    from proxy.simulator.settings import SimulatorSettings

    run(
        SimulatorSettings(
            host=host,
            port=port,
            model=model,
            max_loras=max_loras,
            max_cpu_loras=max_cpu_loras,
            max_lora_rank=max_lora_rank,
            max_model_len=max_model_len,
            speed=speed,
        )
    )


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="How long to run.")] = 20.0,
    json: Annotated[Path | None, typer.Option(help="Write the summary to this file as well.")] = None,
) -> None:
    """Run a training in small on simulated replicas.

    Two replicas, the proxy, a trainer that publishes every few seconds, and GRPO rollouts whose every token is checked.
    Ends with status 1 if a rollout failed or a token came from other weights than it was asked of.
    """
    from proxy.demo.run import run_demo

    try:
        if json is not None:
            json.open("a").close()  # before the run, which would be in vain
    except OSError as error:
        raise SettingsError(f"--json {json} cannot be written: {error.strerror}.") from None
    summary = run_demo(seconds, lambda line: print(line, file=sys.stderr, flush=True))
    text = summary.model_dump_json(indent=2)
    print(text, flush=True)
    if json is not None:
        json.write_text(text + "\n")
    if not summary.passed:
        raise typer.Exit(1)


def _refuse_if_shadowed() -> None:
    """PyPI's `proxy.py` installs a top-level package `proxy` too; whichever came last has mixed the two up."""
    owners = importlib.metadata.packages_distributions().get("proxy", [])
    others = sorted({owner for owner in owners if owner != "lora-sync-proxy"})
    if others:
        raise SettingsError(
            f"The distribution {', '.join(others)} also installs a package named `proxy`, which lora-sync-proxy needs: "
            f"run `pip uninstall {' '.join(others)}` and install lora-sync-proxy again, or use another environment."
        )


def main() -> None:
    """Run the command line. Bad configuration ends with one sentence on stderr and exit status 64."""
    try:
        _refuse_if_shadowed()
        app()
    except SettingsError as error:
        sys.exit(_fail(error, EXIT_USAGE))
    except LoraSyncError as error:
        sys.exit(_fail(error, 1))
    except OSError as error:
        if error.errno not in NO_OUTPUT:
            raise
        sys.exit(_fail(f"its output cannot be written: {error.strerror}", 1))


def _fail(error: object, status: int) -> int:
    print(f"lora-sync-proxy: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
