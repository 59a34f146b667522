"""What became of each publication, told once: to the caller, and under FSDP2 to every rank."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from dataclasses import dataclass

from trainer_client.errors import EarlierPublishError, PublishError
from trainer_client.policies import Policy


@dataclass(frozen=True)
class Outcome:
    """A publication that has ended. One of `policy` and `error` is there."""

    number: int
    policy: Policy | None = None
    error: Exception | None = None


class Outcomes:
    """The publications that the caller has not been told of, by number in the order of the calls."""

    def __init__(self) -> None:
        self._next = 0
        self._untold: dict[int, Future[Policy]] = {}

    def add(self, future: Future[Policy]) -> int:
        """Take note of a publication and return its number, which is the same on every rank."""
        self._next += 1
        self._untold[self._next] = future
        return self._next

    def news(self) -> tuple[Outcome, ...]:
        """Return what has ended and was not told yet."""
        ended = [number for number, future in self._untold.items() if future.done()]
        return tuple(
            _outcome(number, future) for number in ended if not (future := self._untold.pop(number)).cancelled()
        )

    def learn(self, news: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """Settle the futures of this rank by what rank 0 tells, and return it. Rank 0 knows it already."""
        for outcome in news:
            if future := self._untold.pop(outcome.number, None):
                if outcome.error:
                    future.set_exception(outcome.error)
                else:
                    assert outcome.policy
                    future.set_result(outcome.policy)
        return news

    def cancel(self) -> None:
        """Cancel the futures that nobody will settle any more."""
        for future in self._untold.values():
            future.cancel()
        self._untold.clear()


def raise_failures(news: tuple[Outcome, ...], *, own: int | None = None) -> None:
    """Raise the error of publication `own` if it has failed, else one that tells of all earlier failures, if any."""
    earlier = [outcome.error for outcome in news if outcome.error and outcome.number != own]
    told = f"earlier publications have failed: {'; '.join(str(error) for error in earlier)}"
    for outcome in news:
        if outcome.error and outcome.number == own:
            if earlier:
                outcome.error.add_note(told)
            raise outcome.error
    if earlier:
        raise EarlierPublishError(told, errors=tuple(earlier)) from earlier[0]


def _outcome(number: int, future: Future[Policy]) -> Outcome:
    error = future.exception()
    return Outcome(number, error=portable(error)) if error else Outcome(number, policy=future.result())


def portable(error: BaseException) -> Exception:
    """Return the error, or, if it cannot travel to another rank, a PublishError with its words."""
    try:
        pickle.loads(pickle.dumps(error))
        travels = isinstance(error, Exception)
    except Exception:  # noqa: BLE001  whatever an exception's own code raises
        travels = False
    return error if travels else PublishError(f"{type(error).__name__}: {error}")  # type: ignore[return-value]
