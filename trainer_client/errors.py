"""Every error of the trainer client. Catch PublishError to go on training with the policy before.

proxy.errors.LoraSyncError
├── proxy.errors.SettingsError   an argument that cannot work: run, step, store, URL, rank
├── JobsError                    a fleet of Jobs cannot be brought up, asked or ended
│   └── HubSilentError           the Hub gave no clear answer: what was asked for may have happened, or may yet
└── PublishError                 the policy is not live; the message says what to do
    ├── UnservableError          the adapter cannot be served: broken files, NaN, or of a kind that vLLM refuses
    ├── RewindError              the step is lower than that of the newest policy
    ├── StoreError               the store cannot be read or written in time, or someone else is publishing this run
    ├── EarlierPublishError      a publication with wait=False has failed since; the one that is asked for now goes on
    └── ProxyError               the proxy cannot be reached or said no
        └── AnnounceError        ... to a policy that is published: publish the same bytes again

Each can be made from its message alone, and so travels between processes by pickle, its attributes with it.
"""

from __future__ import annotations

from proxy.contract import LoadReport, ReloadReport
from proxy.errors import LoraSyncError


class JobsError(LoraSyncError):
    """A fleet of Jobs cannot be brought up, asked or ended. The message says what to do."""


class HubSilentError(JobsError):
    """The Hub gave no clear answer. What was asked for may have happened, or may yet: look before asking again."""


class PublishError(LoraSyncError):
    """The policy is not live. Publishing again is always safe."""


class UnservableError(PublishError):
    """The adapter cannot be served. The message lists every reason with file and tensor."""


class RewindError(PublishError):
    """The step is lower than that of the newest policy: an old checkpoint, or another run under the same name."""


class StoreError(PublishError):
    """The store cannot be read or written, or another publisher of the same run is at work."""


class ProxyError(PublishError):
    """The proxy cannot be reached or said no. `status` is its HTTP status, None if it did not answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EarlierPublishError(PublishError):
    """Publications with `wait=False` have failed since the last call. The one that raised this goes on all the same.

    `errors` are their own errors, in order.
    """

    def __init__(self, message: str, *, errors: tuple[Exception, ...] = ()) -> None:
        super().__init__(message)
        self.errors = errors


class AnnounceError(ProxyError):
    """The proxy did not make a published policy live.

    The files stay in the store, so that publishing the same bytes again only announces them again. `policy` is the
    name, `report` tells how it went on each replica (None if the proxy did not say), `reason` is the proxy's word for
    why (X-Proxy-Error), `retry_after_s` how many seconds it asked to wait.
    """

    def __init__(
        self,
        message: str,
        *,
        policy: str = "",
        status: int | None = None,
        reason: str = "",
        report: LoadReport | ReloadReport | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message, status=status)
        self.policy = policy
        self.reason = reason
        self.report = report
        self.retry_after_s = retry_after_s
