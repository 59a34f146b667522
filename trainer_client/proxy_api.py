"""The proxy over HTTP: load, unload, pause, the state of policies. The only module that knows statuses and retries."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import httpx2
from pydantic import BaseModel, ValidationError

from proxy.contract import (
    API_KEY,
    LOAD_PATH,
    POLICIES_PATH,
    RELOAD_PATH,
    REPLICAS_PATH,
    STATS_PATH,
    UNLOAD_PATH,
    LoadReport,
    LoadRequest,
    PolicyList,
    PolicyStatus,
    ReloadReport,
    ReloadRequest,
    ReplicaList,
    ReplicaStatus,
    Stats,
    UnloadRequest,
)
from proxy.errors import SettingsError
from trainer_client.errors import AnnounceError, ProxyError
from trainer_client.fleet import FleetLimits, limits_of
from trainer_client.keys import CallerKeys

PAUSE_PATH = "/pause"
RESUME_PATH = "/resume"

CONTROL_TIMEOUT_S = 30.0
"""For an unload or a question: the proxy answers both at once, without waiting for a replica."""

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
"""Pauses between two announcements double from the first to the longest: a proxy restarts within seconds."""

_WHO_ELSE = "is this vLLM itself, not lora-sync-proxy?"

NO_TLS = "[SSL"
"""So begins what Python's ssl says of a port without TLS, or a certificate that is none of the host's."""

MAX_WORDS = 500
"""Characters of an answer that is not JSON, such as a gateway's page, that go into an error."""

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)
Report = TypeVar("Report", LoadReport, ReloadReport)


PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of the rollouts in flight: frozen, waited for, or cut short."""


class ProxyApi:
    """A connection to one proxy. Every call has a limit; only `load` and `reload` are repeated.

    Keys that are not given come from the environment (`keys`).
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        retry_timeout_s: float,
        reload_timeout_s: float = 0.0,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
        api_key: str | None = None,
        admin_key: str | None = None,
    ) -> None:
        self.url = _checked(url)
        self._keys = CallerKeys.found(api_key=api_key, admin_key=admin_key)
        self._control_timeout_s = control_timeout_s
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._reload_timeout_s = reload_timeout_s
        self._http = httpx2.Client()

    def __repr__(self) -> str:
        return f"<ProxyApi {self.url}>"

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._http.close()

    def load(self, request: LoadRequest) -> LoadReport:
        """Announce a policy and wait until every replica serves it. Raises AnnounceError.

        A proxy that does not answer or is not ready is asked again: announcing a policy twice changes nothing.
        """
        return self._announce(LOAD_PATH, request, LoadReport, name=request.lora_name, limit_s=self._timeout_s)

    def reload(self, request: ReloadRequest) -> ReloadReport:
        """Announce merged weights and wait until every replica that is up serves them. Raises AnnounceError.

        Asked again as `load` is, and while another change of base weights is under way.
        """
        return self._announce(RELOAD_PATH, request, ReloadReport, name=request.name, limit_s=self._reload_timeout_s)

    def _announce(self, path: str, request: BaseModel, model: type[Report], *, name: str, limit_s: float) -> Report:
        deadline = time.monotonic() + limit_s
        give_up, pause = None, FIRST_PAUSE_S
        while True:
            try:
                return self._announce_once(path, request, model, name=name, limit_s=deadline - time.monotonic())
            except AnnounceError as error:
                now = time.monotonic()
                give_up = give_up or min(deadline, now + self._retry_timeout_s)
                wait = max(pause, error.retry_after_s)
                if not is_retryable(error.status, reason=error.reason) or now + wait >= give_up:
                    raise
                log.warning("%s (trying again in %.1f s)", error, wait)
            time.sleep(wait)
            pause = min(2 * pause, MAX_PAUSE_S)

    def unload(self, name: str) -> bool:
        """Ask for the unload of a policy; False if the proxy does not know it. Raises ProxyError."""
        return self._call("POST", UNLOAD_PATH, json=UnloadRequest(lora_name=name).model_dump()).is_success

    def status(self, name: str) -> PolicyStatus | None:
        """Return the state of a policy, None if the proxy does not know it. Raises ProxyError."""
        response = self._call("GET", f"{POLICIES_PATH}/{quote(name, safe='')}")
        return self._read(response, PolicyStatus) if response.is_success else None

    def statuses(self) -> tuple[PolicyStatus, ...]:
        """Return the state of every policy that the proxy knows. Raises ProxyError."""
        return self.policies().policies

    def policies(self) -> PolicyList:
        """Return every policy that the proxy knows, and how many it has slots for. Raises ProxyError."""
        return self._read(self._call("GET", POLICIES_PATH), PolicyList)

    def fleet(self) -> ReplicaList:
        """Return the state of every replica, and which checkpoints they need. Raises ProxyError."""
        return self._read(self._call("GET", REPLICAS_PATH), ReplicaList)

    def replicas(self) -> tuple[ReplicaStatus, ...]:
        """Return the state of every replica. Raises ProxyError."""
        return self.fleet().replicas

    def stats(self) -> Stats:
        """Return where rollouts went. Raises ProxyError."""
        return self._read(self._call("GET", STATS_PATH), Stats)

    def limits(self) -> FleetLimits:
        """Return what the fleet can serve. Raises ProxyError."""
        return limits_of(self.replicas())

    def pause(self, mode: PauseMode) -> None:
        """Pause every replica. Raises ProxyError."""
        self._expect_success(self._call("POST", PAUSE_PATH, params={"mode": mode}, timeout_s=self._timeout_s))

    def resume(self) -> None:
        """Resume every replica. Raises ProxyError."""
        self._expect_success(self._call("POST", RESUME_PATH))

    def _announce_once(
        self, path: str, request: BaseModel, model: type[Report], *, name: str, limit_s: float
    ) -> Report:
        try:
            response = self._send("POST", path, json=request.model_dump(mode="json"), limit_s=limit_s)
        except httpx2.TransportError as error:
            message = f"{self.url} did not answer the announcement of {name}: {_words(error)}; "
            if no_tls := NO_TLS in str(error):
                message += "see whether the proxy's URL begins as it should, with http:// or https://"
            else:
                message += "whether it is live is unknown: see that the proxy runs, then publish the same adapter again"
            raise AnnounceError(message, policy=name, reason="tls" if no_tls else "") from error
        report = _report(response, model)
        if response.is_success and report and report.status == "live":
            return report
        raise AnnounceError(
            f"{self.url} did not load {name} (HTTP {response.status_code}): {self._refusal(response, report)}",
            policy=name,
            status=response.status_code,
            reason=response.headers.get("X-Proxy-Error", ""),
            report=report,
            retry_after_s=_retry_after_s(response),
        )

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> httpx2.Response:
        """Return a success, or a 404 of the proxy's own: one of a gateway before it says nothing about policies."""
        limit_s = self._control_timeout_s if timeout_s is None else timeout_s
        try:
            response = self._send(method, path, json=json, params=params, limit_s=limit_s)
        except httpx2.TransportError as error:
            message = f"{self.url} did not answer {method} {path}: {_words(error)}; does lora-sync-proxy run there?"
            raise ProxyError(message) from error
        unknown = response.status_code == httpx2.codes.NOT_FOUND and "X-Proxy-Error" in response.headers
        if not (response.is_success or unknown):
            message = f"{self.url} refused {method} {path} (HTTP {response.status_code}): {self._reason(response)}"
            raise ProxyError(message, status=response.status_code)
        return response

    def _reason(self, response: httpx2.Response) -> str:
        """Return why a call was refused, and what to do where the answer itself does not know it."""
        if "X-Proxy-Error" not in response.headers:
            return f"{_message(response) or 'no reason given'}; {_WHO_ELSE}"
        if response.status_code != httpx2.codes.UNAUTHORIZED:
            return _message(response)
        if self._keys.headers("POST", LOAD_PATH):
            return f"the key that was sent ({API_KEY}, or api_key) is none of the proxy's"
        return f"it asks for a key, and none was sent; set {API_KEY}, or give api_key"

    def _refusal(self, response: httpx2.Response, report: LoadReport | ReloadReport | None) -> str:
        if response.is_success and not report:
            return f"the answer is no load report; {_WHO_ELSE}"
        replicas = (
            [f"{replica.replica} {replica.status}: {replica.message}" for replica in report.replicas] if report else []
        )
        return "; ".join([self._reason(response), *(line for line in replicas if not line.endswith(": "))])

    def _send(
        self, method: str, path: str, *, limit_s: float, json: Any = None, params: dict[str, str] | None = None
    ) -> httpx2.Response:
        """Return the whole answer. Raises httpx2.TransportError if nothing came for `limit_s`, or not all by then."""
        deadline = time.monotonic() + limit_s
        headers, limits = self._keys.headers(method, path), self._limit(limit_s)
        with self._http.stream(
            method, self.url + path, json=json, params=params, headers=headers, timeout=limits
        ) as response:
            content = bytearray()
            for piece in response.iter_raw():
                content += piece
                if time.monotonic() > deadline:  # a gateway on the way may go on sending something
                    raise httpx2.ReadTimeout(f"not all of the answer within {limit_s:g} s", request=response.request)
        return httpx2.Response(
            response.status_code, headers=response.headers, content=bytes(content), request=response.request
        )

    def _expect_success(self, response: httpx2.Response) -> None:
        if not response.is_success:
            message = f"{response.request.url} is unknown there: {_message(response)}"
            raise ProxyError(message, status=response.status_code)

    def _read(self, response: httpx2.Response, model: type[Model]) -> Model:
        try:
            return model.model_validate_json(response.content)
        except ValidationError as error:
            message = f"{response.request.url} did not answer as a lora-sync-proxy does: {_message(response)}"
            raise ProxyError(message, status=response.status_code) from error

    def _limit(self, seconds: float) -> httpx2.Timeout:
        seconds = max(seconds, 0.001)  # 0 would mean something else to the socket
        return httpx2.Timeout(seconds, connect=min(seconds, self._connect_timeout_s))


def is_retryable(status: int | None, *, reason: str = "") -> bool:
    """Tell whether an announcement may succeed when repeated: no answer at all (None), a proxy that is not ready, or
    one that is in the middle of another change of base weights (`reason`: its X-Proxy-Error). Not where there is no TLS
    to be had (`reason`: tls)."""
    if reason == "tls":
        return False
    return status is None or status == httpx2.codes.SERVICE_UNAVAILABLE or reason == "under_way"


def _checked(url: str) -> str:
    if "@" in url:  # before anything else: no message may repeat it
        raise SettingsError(f"the proxy's URL has a user in it; set {API_KEY}, or give api_key, instead.")
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise SettingsError(f"the proxy's URL {url!r} cannot be used: {error}.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SettingsError(f"the proxy's URL {url!r} is not http or https; give one like http://localhost:8000.")
    if parsed.path.rstrip("/").endswith("/v1"):
        raise SettingsError(f"the proxy's URL {url!r} ends with /v1, which is for rollouts; leave it out here.")
    return url.rstrip("/")


def _report(response: httpx2.Response, model: type[Report]) -> Report | None:
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        return None


def _message(response: httpx2.Response) -> str:
    """Return the reason in vLLM's error shape, FastAPI's, or whatever text there is."""
    try:
        body = response.json()
        return str(body["error"]["message"] if "error" in body else body["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return response.text[:MAX_WORDS]


def _retry_after_s(response: httpx2.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _words(error: Exception) -> str:
    return f"{type(error).__name__}{f' ({error})' if str(error) else ''}"
