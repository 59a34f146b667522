"""Which fleet a command is about: given by its name or its config, or the only one that was started from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxy.errors import SettingsError
from trainer_client.jobs import state
from trainer_client.jobs.config import FleetConfig, read
from trainer_client.jobs.hub import Hub
from trainer_client.jobs.launch import FLEET_LABEL
from trainer_client.jobs.seen import Job


@dataclass(frozen=True)
class Target:
    """A fleet. `config` is None where only its name is known."""

    name: str
    hub: Hub
    config: FleetConfig | None = None

    def jobs(self, *, alive: bool = True) -> list[Job]:
        """Return its Jobs, of whichever run, replicas first; of one seat the oldest first."""
        found = self.hub.jobs({FLEET_LABEL: self.name}, alive=alive)
        return sorted(found, key=lambda job: (job.seat.role, job.seat.number, job.created))

    def crashed(self) -> bool:
        """Return whether an `up` of this fleet was started here and has gone without ending it."""
        mine = (self.name, self.hub.namespace)
        return any((one.fleet, one.namespace) == mine and not one.watched for one in state.records())


def find(fleet: str | None, namespace: str | None = None) -> Target:
    """Return the fleet of this name or config, of None the one started from here. Raises SettingsError if unclear."""
    if fleet is not None and (fleet.endswith((".yaml", ".yml")) or Path(fleet).is_file()):
        config = read(Path(fleet))
        return Target(config.name, Hub(config.namespace), config)
    known = [one for one in state.records() if fleet in (None, one.fleet) and namespace in (None, one.namespace)]
    if fleet is None and len(known) != 1:
        names = ", ".join(f"{one.namespace}/{one.fleet}" for one in known)
        what = f"several fleets were started from here ({names})" if known else "no fleet was started from here"
        raise SettingsError(f"{what}; name one, or give its config")
    if len(known) != 1:
        return Target(str(fleet), Hub(namespace))
    (record,) = known
    path = Path(record.config)
    return Target(record.fleet, Hub(record.namespace), read(path) if path.is_file() else None)
