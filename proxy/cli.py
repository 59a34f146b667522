"""The command `lora-sync-proxy`: serve (when no subcommand is named), sim, demo."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from typing import Annotated

import typer

from proxy.errors import LoraSyncError, SettingsError

EXIT_USAGE = 64
"""sysexits.h EX_USAGE: the configuration cannot work."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One HTTP endpoint that makes N vLLM replicas behave as one server for LoRA reinforcement learning.\n\n"
    "Without a subcommand it serves: UPSTREAM_URLS=http://host1:8000,http://host2:8000 lora-sync-proxy",
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
    """Run the proxy. It is configured by environment variables; the README lists them all.

    UPSTREAM_URLS (required), HF_TOKEN, PROXY_HOST, PROXY_PORT, PROXY_LORA_LOAD_TIMEOUT_S, PROXY_DRAIN_TIMEOUT_S, ...
    """
    from proxy.app import configure_logging
    from proxy.app import serve as run
    from proxy.settings import Settings, unknown_variables

    configure_logging()
    settings = Settings.from_env()
    for sentence in unknown_variables(os.environ):
        logging.getLogger(__name__).warning(sentence)
    run(settings)


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


def _fail(error: LoraSyncError, status: int) -> int:
    print(f"lora-sync-proxy: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
