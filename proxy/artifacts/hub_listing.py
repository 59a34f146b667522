"""Whether files have landed in a bucket of the Hub: all of them listed, each with its size and its content (Xet hash).

`Landing` decides what to ask the Hub next and what its answer means. Who has a connection carries that out:
`wait_landed` in a thread, the proxy's gate on its event loop. No replica may look before that: a mount remembers for
up to 30 s that a file was not there (hf-mount 0.9.2).

What is asked, and why. Listing the folder answers everything at once, and is what a mount looks a directory up by, so
it comes first and has the last word; but it counts against 1,000 API calls in 5 minutes (a free account's), and may be
old. While files are missing, they are asked for one by one with HEAD, as a mount looks a file up: that is never old,
and counts against 5,000 calls. The Hub's feed of changes would tell no sooner, since it gathers changes for 0.2 s.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import httpx2

from proxy.artifacts.bucket import BucketFolder, HubFile
from proxy.errors import ArtifactError

CALL_TIMEOUT_S = 10.0
"""One question takes about 0.1 s; the Hub's own client would wait for ever."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
PAUSE_SHARE = 1 / 40
"""Pauses grow with the time that has passed: what lands after 2.5 s is noticed within 0.07 s, by about 50 HEADs, and
waiting for 300 s takes about 300."""

LISTING_PAUSE_S = 0.25
"""Shortest pause between two listings, and after an error of the Hub."""

_FOR_EVER_S = 10**9
_MOST_DIGITS = 18
"""Python refuses to read a number of 4,300 digits, and to make a float of one of 309."""

_NOT_THERE = 404
_NO_ACCESS = (401, 403)
_NO_BUCKET = "RepoNotFound"


@dataclass(frozen=True)
class HubAccess:
    """Where the Hub is, and who asks."""

    endpoint: str
    headers: Mapping[str, str] = field(repr=False)
    """With the token, which is printed nowhere."""

    @classmethod
    def usual(cls, endpoint: str | None = None, *, token: str | None = None) -> Self:
        """Return the Hub that HF_ENDPOINT names, with `token`, or huggingface_hub's: HF_TOKEN, or its token file.

        May read that file, or ask for a token where the machine has an identity.
        """
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers

        headers = build_hf_headers(token=token, library_name="lora-sync-proxy")
        return cls((endpoint or constants.ENDPOINT).rstrip("/"), headers)


def client_options() -> dict[str, Any]:
    """Return the options of an httpx2 client for questions to the Hub: the system's authorities, no redirects."""
    return {"verify": ssl.create_default_context(), "timeout": CALL_TIMEOUT_S}


class Landing:
    """The wait for the files of one folder. Ask `request()`, tell `learn()` or `failed()`, pause, until `whole`."""

    def __init__(
        self,
        folder: BucketFolder,
        files: Iterable[HubFile],
        *,
        hub: HubAccess,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.whole = False
        """Whether the last listing had every file."""
        self.pause_s = 0.0
        """Seconds to wait before the next question."""
        self._folder = folder
        self._files = {file.name: file for file in files}
        self._hub = hub
        self._deadline = deadline
        self._clock = clock
        self._began = clock()
        self._unseen: dict[str, str] = {}
        """What HEAD does not find whole, by name, with the reason. While it is empty the folder is listed."""
        self._trouble = ""
        """The last answer that was none."""
        self._missing: dict[str, str] | None = None
        """What the last listing lacked, None before the first."""

    def __repr__(self) -> str:
        return f"<Landing {self._folder} whole={self.whole} missing={list(self._unseen or self._missing or ())}>"

    def request(self) -> dict[str, Any]:
        """Return the next question, as arguments of an httpx2 client's `request`."""
        left = max(self._deadline - self._clock(), 0.001)
        question = {"headers": self._hub.headers, "timeout": min(CALL_TIMEOUT_S, left), "follow_redirects": False}
        if self._unseen:
            path = quote(self._folder.file(next(iter(self._unseen))), safe="")
            url = f"{self._hub.endpoint}/buckets/{self._folder.bucket}/resolve/{path}"
            return {"method": "HEAD", "url": url} | question
        prefix = quote(f"{self._folder.path}/", safe="") if self._folder.path else ""
        url = f"{self._hub.endpoint}/api/buckets/{self._folder.bucket}/tree/{prefix}"
        return {"method": "GET", "url": url, "params": {"recursive": "true"}} | question

    def learn(self, answer: httpx2.Response) -> None:
        """Take the answer in. Raises ArtifactError if asking again is of no use, or if there is no time left for it."""
        if is_closed(answer):
            raise ArtifactError(no_bucket(self._folder.bucket, self._hub.endpoint, answer.status_code))
        self._trouble, self.pause_s = "", 0.0
        if answer.is_error and answer.status_code != _NOT_THERE:
            self._wait(_asked_pause_s(answer) or LISTING_PAUSE_S, trouble=f"the Hub answers {answer.status_code}")
        elif self._unseen:
            self._learn_head(answer)
        else:
            try:
                listed = _listed(answer)
            except (ValueError, KeyError, TypeError, RecursionError):
                self._wait(LISTING_PAUSE_S, trouble="something else than the Hub answers")
            else:
                self._learn_listing(listed)

    def failed(self, error: Exception) -> None:
        """Take note that there was no answer. Raises ArtifactError if there is no time left to ask again."""
        self._wait(LISTING_PAUSE_S, trouble=f"the Hub does not answer ({type(error).__name__}: {error})")

    def _learn_head(self, answer: httpx2.Response) -> None:
        name = next(iter(self._unseen))
        why = f"{name} is not there"
        if (xet_hash := answer.headers.get("X-Xet-Hash")) is not None:
            told = answer.headers.get("X-Linked-Size") or answer.headers.get("Content-Length") or ""
            why = self._files[name].why_not(_number(told, otherwise=-1), xet_hash)
        if why:
            self._unseen[name] = why
            self._wait(FIRST_PAUSE_S)
        else:
            del self._unseen[name]

    def _learn_listing(self, listed: Mapping[str, tuple[int, str]]) -> None:
        missing = {}
        for name, file in self._files.items():
            there = listed.get(self._folder.file(name))
            if why := file.why_not(*there) if there else f"{name} is not listed":
                missing[name] = why
        if self._missing is None:
            self._unseen = dict(missing)
        self._missing = missing
        self.whole = not missing
        if missing:
            self._wait(FIRST_PAUSE_S if self._unseen else LISTING_PAUSE_S)

    def _wait(self, shortest_s: float, *, trouble: str = "") -> None:
        self._trouble = trouble
        now = self._clock()
        self.pause_s = max(shortest_s, min((now - self._began) * PAUSE_SHARE, LONGEST_PAUSE_S))
        if now + self.pause_s > self._deadline:
            raise ArtifactError(self._late())

    def _late(self) -> str:
        missing = self._unseen or self._missing or {}
        told = "; ".join(filter(None, [*missing.values(), self._trouble])) or "it was not asked in time"
        waited = self._clock() - self._began
        return f"after {waited:.1f} s the Hub does not list the files in {self._folder} whole: {told}"


def is_closed(answer: httpx2.Response) -> bool:
    """Return whether the Hub says that there is no such bucket for this token. A secret one looks the same."""
    return answer.status_code in _NO_ACCESS or answer.headers.get("X-Error-Code") == _NO_BUCKET


def no_bucket(bucket: str, endpoint: str, status: int) -> str:
    """Say that a bucket cannot be used, and what to do."""
    return (
        f"bucket {bucket} is not at {endpoint}, or the token has no access to it (HTTP {status}); make it with "
        f"`hf buckets create {bucket}`, or give a token that may use it (HF_TOKEN, or `hf auth login`)"
    )


def wait_landed(landing: Landing, client: httpx2.Client) -> None:
    """Return once the Hub lists every file whole. Blocks. Raises ArtifactError at the deadline, or if it never will."""
    while not landing.whole:
        try:
            landing.learn(client.request(**landing.request()))
        except httpx2.HTTPError as error:
            landing.failed(error)
        time.sleep(landing.pause_s)


def _listed(answer: httpx2.Response) -> dict[str, tuple[int, str]]:
    """Return size and hash of every file in a listing, by its path in the bucket."""
    if answer.status_code == _NOT_THERE:
        return {}
    return {entry["path"]: (entry["size"], entry["xetHash"]) for entry in answer.json() if entry["type"] == "file"}


def _asked_pause_s(answer: httpx2.Response) -> float:
    """Return how long the Hub asks to wait (Retry-After, or RateLimit with nothing left), 0 if it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers

    try:
        limit = parse_ratelimit_headers(answer.headers)
    except ValueError:
        limit = None  # a number that is too long to be one
    used_up = limit.reset_in_seconds if limit is not None and limit.remaining == 0 else 0
    return float(min(max(used_up, _number(answer.headers.get("Retry-After", ""), otherwise=0)), _FOR_EVER_S))


def _number(text: str, *, otherwise: int) -> int:
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else otherwise
