"""Jobs and buckets on the Hub, through huggingface_hub: which of its answers are final, and which say nothing.

huggingface_hub sends `run_job` once and with no time limit of its own. Whoever starts a Job must look for it by its
labels when the answer is lost (HubSilentError): it may be running, and be paid for.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from huggingface_hub import HfApi, JobInfo, get_token, set_client_factory
from huggingface_hub.errors import BucketNotFoundError, HfHubHTTPError, JobNotFoundError, LocalTokenNotFoundError
from huggingface_hub.utils._http import default_client_factory

from proxy.errors import SettingsError
from trainer_client.deadlines import within
from trainer_client.errors import HubSilentError, JobsError, StoreError
from trainer_client.jobs.launch import TOKEN, Call
from trainer_client.jobs.seen import ENDED, Job, job_of

CALL_TIMEOUT_S = 30.0
"""The Hub answers within a second or two. huggingface_hub itself would wait for ever, repeats some calls five times,
and sleeps for as long as the Hub asks: this is for all of it."""

HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__mro__[1])
"""Of the HTTP library that this huggingface_hub uses: httpx2 from 2.0 on, before that httpx."""

Answer = TypeVar("Answer")

_ALIVE = ["SCHEDULING", "RUNNING"]
_LATER = {408, 425, 429}
"""Not now, but perhaps in a moment; as are all from 500 on."""

TRY_TIMEOUT_S = 60.0
"""For a small file to be written and removed: a second or two, or as long as hf_xet repeats what failed."""

COPY_TIMEOUT_S = 600.0
"""For the trainer's code to be in the bucket: 3 GB at 5 MB/s."""

NO_TOKEN = "there is no token: set HF_TOKEN, or run `hf auth login`"


class Hub:
    """The Jobs of one namespace: the one given, or the token's own account. Raises JobsError without a good token."""

    def __init__(self, namespace: str | None = None) -> None:
        self._api = HfApi()
        set_client_factory(_impatient)  # for the whole process, which runs one command
        if get_token() is None:
            raise JobsError(NO_TOKEN)
        self.namespace = namespace or str(self.account()["name"])

    def __repr__(self) -> str:
        return f"<Hub {self._api.endpoint} namespace={self.namespace}>"

    def account(self) -> dict[str, Any]:
        """Return what the Hub knows of the token: `name`, `orgs`, `auth`."""
        account: dict[str, Any] = _asked("asking whose token this is", self._api.whoami, CALL_TIMEOUT_S)
        return account

    def create_bucket(self, call: Call) -> None:
        """Carry out `launch.bucket_call`; nothing happens if the bucket is there."""
        doing = f"creating bucket {call.arguments['bucket_id']}"
        _asked(doing, partial(self._api.create_bucket, **call.arguments), CALL_TIMEOUT_S)

    def copy_code(self, call: Call) -> None:
        """Carry out `launch.code_call`."""
        doing = f"copying {call.arguments['source']} into the bucket"
        _asked(doing, partial(self._api.sync_bucket, **call.arguments), COPY_TIMEOUT_S)

    def has_bucket(self, bucket: str) -> bool:
        """Return whether the bucket is there, for this token."""

        def found() -> bool:
            try:
                self._api.bucket_info(bucket)
            except BucketNotFoundError:
                return False
            return True

        return _asked(f"asking for bucket {bucket}", found, CALL_TIMEOUT_S)

    def try_writing(self, bucket: str, path: str) -> None:
        """Write a small file into the bucket and remove it. Raises JobsError where that is refused."""

        def write() -> None:
            self._api.batch_bucket_files(bucket, add=[(b"written by `lora-sync jobs preflight`\n", path)])
            self._api.batch_bucket_files(bucket, delete=[path])

        _asked(f"writing to bucket {bucket}", write, TRY_TIMEOUT_S)

    def run(self, call: Call, secrets: Mapping[str, str]) -> Job:
        """Start a Job and return it. Raises JobsError if the Hub refuses, HubSilentError if it may have started."""
        if unknown := call.arguments.keys() - inspect.signature(self._api.run_job).parameters.keys():
            raise JobsError(f"this huggingface_hub has no Jobs with {', '.join(sorted(unknown))}; install 2.0 or newer")
        start = partial(
            self._api.run_job, **call.arguments, secrets={name: secrets[name] for name in call.secrets} or None
        )
        info = _asked(f"starting {call.arguments['name']}", start, CALL_TIMEOUT_S)
        job = job_of(info)
        if job is None:
            raise JobsError(f"the Hub shows Job {info.id} without the labels that it was started with: {info.labels}")
        return job

    def jobs(self, labels: Mapping[str, str], *, alive: bool = False) -> list[Job]:
        """Return the Jobs of fleets that have these labels, the newest first; with `alive`, only what is not over."""
        options: dict[str, Any] = {"labels": dict(labels), "timeout": CALL_TIMEOUT_S}
        if alive:
            options["status"] = _ALIVE

        def listed() -> list[JobInfo]:
            return list(self._api.list_jobs(namespace=self.namespace, **options))

        found = _asked(f"listing the Jobs of {self.namespace}", listed, CALL_TIMEOUT_S)
        return [job for info in found if (job := job_of(info)) is not None]

    def cancel(self, job: Job) -> None:
        """Ask the Hub to end a Job; nothing happens if it has ended."""

        def cancel() -> None:
            try:
                self._api.cancel_job(job_id=job.id, namespace=self.namespace)
            except JobNotFoundError:
                return
            except HfHubHTTPError:
                # A Job that ends meanwhile cannot be canceled, and need not be.
                if self._stage(job) not in ENDED:
                    raise

        _asked(f"canceling {job}", cancel, CALL_TIMEOUT_S)

    def last_lines(self, job: Job, count: int) -> list[str]:
        """Return the last lines of a Job's log. For a running one this takes 5 s, since its log has no end yet."""

        def read() -> list[str]:
            return list(self._api.fetch_job_logs(job_id=job.id, namespace=self.namespace, tail=count))[-count:]

        return _asked(f"reading the log of {job}", read, CALL_TIMEOUT_S)

    def follow(self, job: Job, tail: int | None) -> Iterator[str]:
        """Yield the lines of a Job's log until it ends."""
        with _told(f"reading the log of {job}"):
            yield from self._api.fetch_job_logs(job_id=job.id, namespace=self.namespace, follow=True, tail=tail)

    def _stage(self, job: Job) -> str:
        status = self._api.inspect_job(job_id=job.id, namespace=self.namespace).status
        return str(getattr(status.stage, "value", status.stage))


def secret_values(names: set[str]) -> dict[str, str]:
    """Return the values of secrets from this process's environment; HF_TOKEN also from where `hf auth login` keeps it.

    Raises SettingsError that names those which are missing.
    """
    values = {name: value for name in sorted(names) if (value := _secret(name))}
    if missing := sorted(names - values.keys()):
        raise SettingsError(
            f"not set in the environment: {', '.join(missing)}; export what is missing, or remove it from `secrets`"
        )
    return values


def _secret(name: str) -> str | None:
    return os.environ.get(name) or (get_token() if name == TOKEN else None)


def _asked(doing: str, call: Callable[[], Answer], limit_s: float) -> Answer:
    """Return the Hub's answer, with all repetitions of huggingface_hub's. Raises what `_told` raises."""
    with _told(doing):
        try:
            return within(limit_s, lambda _: call(), what=doing)
        except StoreError as error:
            raise HubSilentError(f"{doing}: the Hub gave no answer within {limit_s:g} s") from error


@contextmanager
def _told(doing: str) -> Iterator[None]:
    """Raise what can go wrong as one of two errors, in one sentence without a token in it."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise JobsError(NO_TOKEN) from error
    except HfHubHTTPError as error:
        raise _error(doing, error) from error
    except (HTTP_ERROR, OSError) as error:
        raise HubSilentError(f"{doing}: the Hub gave no answer ({type(error).__name__})") from error


def _impatient() -> Any:
    """Make the HTTP client of huggingface_hub, which makes one anew whenever no connection can be made."""
    client = default_client_factory()
    client.timeout = CALL_TIMEOUT_S
    return client


def _error(doing: str, error: HfHubHTTPError) -> JobsError:
    status = error.response.status_code
    said = error.server_message or error.response.reason_phrase
    if status in _LATER or status >= 500:
        return HubSilentError(f"{doing}: the Hub answered {status}")
    remedy = {
        401: "the token is not valid any more; run `hf auth login`, or set HF_TOKEN",
        402: "see https://huggingface.co/settings/billing",
        403: "use a token that may write there: https://huggingface.co/settings/tokens",
    }.get(status, "change it in the config")
    return JobsError(f"{doing}: the Hub answered {status} ({said}); {remedy}")
