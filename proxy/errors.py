"""Every error this package raises on purpose, and the HTTP shape in which clients see one.

    LoraSyncError
    ├── SettingsError      the configuration cannot work: one sentence on stderr, exit 64
    ├── ArtifactError      a LoRA directory is not what it should be; says which file and why
    └── ApiError           an answer to an HTTP client, in vLLM's error shape

Failures of a replica are data (`controlplane.replica_api` returns them), because every caller decides on them.
"""

from __future__ import annotations

import errno
from typing import Any

import httpx2

NO_ANSWER = (httpx2.HTTPError, AttributeError)
"""What httpx2.AsyncClient raises when there is no answer. The second one: where a connection is reset in the moment in
which it is made, anyio 4 asks a socket that uvloop has taken away already, and nobody translates that."""

NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
"""What a command's output fails with on a full disk, or where there is nothing to write to."""

NOT_FINITE = "Out of range float values"
"""What vLLM 0.32 answers, as a 400, when log-probabilities are NaN or infinite."""

CHALLENGE = 'Basic realm="lora-sync-proxy", charset="UTF-8"'
"""What every 401 has to tell (RFC 9110, section 15.5.2): browsers ask for a password then."""


class LoraSyncError(Exception):
    """Base of everything raised here on purpose."""


class SettingsError(LoraSyncError):
    """The configuration cannot work. The message is one sentence that says what to change."""


class ArtifactError(LoraSyncError):
    """A LoRA directory is not what it should be. The message names the file and what to do."""


class ApiError(LoraSyncError):
    """An answer to the client. `status` is the HTTP status, `reason` a short word for the `X-Proxy-Error` header.

    The body is vLLM's `{"error": {message, type, param, code}}`, so that clients written for vLLM can read it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        reason: str,
        type: str = "ProxyError",
        param: str | None = None,
        retry_after_s: int | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.type = type
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details
        self.request_id: str | None = None
        """Of the rollout that it answers: log lines and replicas know it by this."""

    def body(self) -> dict[str, Any]:
        """Return the JSON body. `details` stand beside `error`, where vLLM's clients do not look."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error, **(self.details or {})}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with the body."""
        headers = {"X-Proxy-Error": self.reason}
        if self.status == 401:
            headers["WWW-Authenticate"] = CHALLENGE
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.request_id is not None:
            headers["X-Request-Id"] = self.request_id
        return headers


def stopping() -> ApiError:
    """Return the answer to what the end of the proxy cuts off before it was answered."""
    return ApiError(503, "The proxy is stopping.", reason="stopping", retry_after_s=1)
