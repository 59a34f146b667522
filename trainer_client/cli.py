"""The `lora-sync` command: publish from a shell, see what is served, check, clean up, print vLLM's arguments.

What has a room of its own brings its commands along: `nccl`, and `status` and `top` from `status`.

Every command prints for people, or JSON for scripts with --json.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from proxy.artifacts.bucket import SCHEME
from proxy.artifacts.check import judge
from proxy.artifacts.config import read_config
from proxy.artifacts.manifest import ADAPTER_FILES
from proxy.artifacts.verdict import Way
from proxy.contract import API_KEY
from proxy.errors import NO_OUTPUT, ArtifactError, LoraSyncError, SettingsError
from trainer_client import slots
from trainer_client.bars import bar
from trainer_client.client import CONNECT_TIMEOUT_S, STORE_TIMEOUT_S, TrainerClient
from trainer_client.deadlines import within
from trainer_client.errors import PublishError, RewindError, UnservableError
from trainer_client.fleet import FleetLimits, on_fleet, other_base
from trainer_client.jobs.commands import app as jobs_app
from trainer_client.nccl.commands import app as nccl_app
from trainer_client.policies import Policy, version_in
from trainer_client.proxy_api import ProxyApi
from trainer_client.status.commands import DEFAULT_PROXY
from trainer_client.status.commands import app as status_app
from trainer_client.stores.hub import download
from trainer_client.stores.policy_store import ORPHAN_AGE_S
from trainer_client.tables import garbage_table, policies_table, policy_sentence, show, size_text
from trainer_client.ways import OnUnservable

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

BAD_INPUT = (SettingsError, ArtifactError, UnservableError, RewindError)

MEANING = {
    Way.ADAPTER: "it goes as it is, as LoRA beside the base model",
    Way.MERGED: "it goes only as a whole model with it merged in (on_unservable='merge', --merge; docs/merged.md)",
    Way.BROKEN: "it goes not at all",
}

ALL = "ALL"
"""For `policies --retire`: the policies of every run."""

app = typer.Typer(
    help="Publish LoRA weights to every vLLM replica behind lora-sync-proxy, and see what it serves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # with rich, paragraphs after the first keep the line breaks of the source
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(jobs_app, name="jobs", short_help="Run a whole fleet on Hugging Face Jobs.")
app.add_typer(nccl_app, name="nccl", short_help="Print the NCCL settings that this host needs.")
app.add_typer(status_app)

Adapter = Annotated[Path, typer.Argument(metavar="DIR", help="Directory that peft saved the adapter to.")]
Proxy = Annotated[str, typer.Option(metavar="URL", help=f"Where lora-sync-proxy listens. Its key: {API_KEY}.")]
MaybeProxy = Annotated[
    str | None, typer.Option(metavar="URL", help="Where lora-sync-proxy listens: its fleet's --max-lora-rank counts.")
]
Store = Annotated[
    str,
    typer.Option(
        metavar="DIR|URL",
        help="Where policies are kept: a directory, hf://buckets/NAMESPACE/NAME, or s3://, gs:// and the like.",
    ),
]
Mount = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="Where replicas see the store. Default: the directory's own path."),
]
Run = Annotated[str, typer.Option(metavar="NAME", help="Name of the training run.")]
MaxStaleness = Annotated[
    int, typer.Option(min=0, metavar="K", help="How many versions a rollout may lag behind the newest.")
]
KeepEvery = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Keep the files of every N-th version as checkpoints.")
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


@app.command(short_help="Publish an adapter to every replica.")
def publish(
    directory: Adapter,
    step: Annotated[int, typer.Option(min=0, metavar="N", help="Optimizer step that the weights come from.")],
    store: Store,
    proxy: Proxy,
    run: Run,
    max_staleness: MaxStaleness,
    mount: Mount = None,
    keep_every: KeepEvery = None,
    allow_rewind: Annotated[
        bool, typer.Option("--allow-rewind", help="Take a step that is lower than the newest policy's.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge into the base model what cannot be served as an adapter.")
    ] = False,
    base_model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="What to merge into. Default: what the adapter's config names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Publish an adapter, and wait until every replica serves it.

    Prints the name that rollouts put into "model". Publishing the same adapter again is safe: it keeps its name.
    """
    options = {"store": store, "mount": mount, "run": run, "max_staleness": max_staleness, "keep_every": keep_every}
    with bar() as tell, _connected(proxy, tell=tell, base_model=base_model, **options) as client:
        on_unservable: OnUnservable = "merge" if merge else "raise"
        policy = client.publish(directory, step, allow_rewind=allow_rewind, on_unservable=on_unservable)
    _print(_as_json(policy), policy_sentence(policy), as_json)


@app.command(short_help="List what is served, by whom, and what holds it.")
def policies(
    proxy: Proxy = DEFAULT_PROXY,
    retire: Annotated[
        str | None,
        typer.Option(metavar="RUN|ALL", help="Unload every policy of a run, or of all runs, before listing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the policies that the proxy knows: their state, who holds them, and how many rollouts use them.

    With --retire, for cleaning up by hand, the policies of a run that has ended are unloaded. Rollouts in flight
    finish; later ones get a 404. Files stay: see `lora-sync gc`.
    """
    with _asking(proxy) as api:
        if retire is not None:
            _retire(api, retire)
        known = api.statuses()
    _print([policy.model_dump() for policy in known], policies_table(known), as_json)


@app.command(short_help="Tell which way an adapter goes, and why.")
def check(
    adapter: Annotated[
        str,
        typer.Argument(metavar="DIR|URL", help="An adapter's directory, or its folder in a bucket: hf://buckets/..."),
    ],
    proxy: MaybeProxy = None,
    as_json: AsJson = False,
) -> None:
    """Tell which way an adapter goes to the replicas, and every reason why not as it is.

    Prints one of: adapter (as it is), merged (only merged into the base model), broken (in neither form), and what that
    means. The exit status is 0 for the first and 2 for the others. --proxy asks whether its fleet serves adapters, and
    up to which rank.
    """
    limits = FleetLimits()
    if proxy is not None:
        with _asking(proxy) as api:
            limits = api.limits()
    with _local(adapter) as directory:
        found = within(
            STORE_TIMEOUT_S, lambda _: judge(directory, max_lora_rank=limits.max_lora_rank), what=f"reading {adapter}"
        )
        verdict = on_fleet(found, limits)
        base = "" if verdict.way is Way.BROKEN else other_base(read_config(directory).base_model, limits)
    meaning = MEANING[verdict.way]
    lines = [f"{adapter}: {verdict.way}: {meaning}", *(f"  {reason}" for reason in verdict.reasons)]
    if base:
        lines.append(f"  but {base}")
    facts = {"way": verdict.way, "meaning": meaning, "reasons": verdict.reasons, "warning": base, **vars(limits)}
    _print(facts, "\n".join(lines), as_json)
    if verdict.way is not Way.ADAPTER:
        raise typer.Exit(EXIT_BAD_INPUT)


@app.command(short_help="Remove what nobody needs from the store.")
def gc(
    store: Store,
    proxy: Proxy,
    run: Run,
    mount: Mount = None,
    min_age: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Leave what an interrupted publisher wrote since then.")
    ] = ORPHAN_AGE_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show it and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody needs from a run's part of the store.

    That is what interrupted publishers have left, and unloaded policies that the proxy says nobody needs. The newest
    policy, checkpoints, whatever is loaded, and everything of other runs stay.
    """
    if "://" not in store and not _is_there(folder := Path(store, run)):
        _print([], f"nothing to remove: {folder} is not there", as_json)
        return
    with _connected(proxy, store=store, mount=mount, run=run, max_staleness=0) as client:
        found = client.gc(dry_run=dry_run, min_age_s=min_age)
    total = size_text(sum(garbage.size for garbage in found))
    _print([vars(garbage) for garbage in found], garbage_table(found) if found else "nothing to remove", as_json)
    if found and not as_json:
        typer.echo(f"{len(found)} folders, {total}{' (nothing removed)' * dry_run}")


@app.command("vllm-args", short_help="Print the flags that vLLM needs.")
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
    found = within(STORE_TIMEOUT_S, lambda _: slots.rank_of(adapter or rank), what=f"reading {adapter}")
    arguments = slots.vllm_args(max_staleness=max_staleness, rank=found)
    _print(arguments, shlex.join(arguments), as_json)


def main() -> None:
    """Run the command. Exit status: 0 done, 1 failed, 2 the input cannot work, 130 interrupted."""
    try:
        app(prog_name="lora-sync")
    except LoraSyncError as error:
        print(f"lora-sync: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, BAD_INPUT) else EXIT_FAILED)
    except OSError as error:
        if error.errno not in NO_OUTPUT:
            raise
        print(f"lora-sync: its output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
    except SystemExit as stopped:
        # typer turns Ctrl-C into this status without a word
        if stopped.code == EXIT_INTERRUPTED:
            print("lora-sync: interrupted; running the same command again is safe", file=sys.stderr)
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


@contextmanager
def _local(adapter: str) -> Iterator[Path]:
    """Give the adapter's directory on this machine; what is in a bucket is there for the `with` block only."""
    if not adapter.startswith(SCHEME):
        yield Path(adapter)
        return
    with TemporaryDirectory(prefix="lora-sync-") as folder:
        within(STORE_TIMEOUT_S, lambda _: download(adapter, ADAPTER_FILES, Path(folder)), what=f"reading {adapter}")
        yield Path(folder)


def _is_there(folder: Path) -> bool:
    return within(STORE_TIMEOUT_S, lambda _: folder.exists(), what=f"looking for {folder}")


def _as_json(policy: Policy) -> dict[str, object]:
    return {
        "name": policy.name,
        "model": policy.model,
        "merged": policy.served_as is not None,
        "version": policy.version,
        "step": policy.step,
        "digest": policy.digest,
        "path": str(policy.path),
        "timings_s": vars(policy.timings),
        "report": policy.report.model_dump(),
    }


@contextmanager
def _asking(proxy: str) -> Iterator[ProxyApi]:
    # neither loads nor retries: only questions and unloads, which have a limit of their own
    api = ProxyApi(proxy, timeout_s=0, retry_timeout_s=0, connect_timeout_s=CONNECT_TIMEOUT_S)
    try:
        yield api
    finally:
        api.close()


def _retire(api: ProxyApi, run: str) -> None:
    policies = [policy for policy in api.statuses() if run == ALL or version_in(run, policy.name) is not None]
    for policy in policies:
        api.unload(policy.name)
    if not policies:
        typer.echo(f"lora-sync: the proxy knows no policy of {'any run' if run == ALL else run}", err=True)


def _print(facts: object, text: RenderableType, as_json: bool) -> None:
    """Print the facts as JSON, or the text: a line, or a table as wide as the terminal."""
    if as_json:
        typer.echo(json.dumps(facts))
    elif isinstance(text, str):
        typer.echo(text)
    else:
        show(text)
