"""Put a decision and the user's own settings together, and set what is left to set."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer_client.nccl.decision import SETTINGS, TREE_ALL_REDUCE, Decision, Setting, decide
from trainer_client.nccl.probe import probe
from trainer_client.nccl.topology import Topology
from trainer_client.nccl.user import ALSO_DECIDED_BY, ENVIRONMENT, UserSetting, user_settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NcclAdvice:
    """What NCCL should run with on this host, and why."""

    topology: Topology
    decision: Decision
    to_set: tuple[Setting, ...]
    """Decided here and not by the user."""
    kept: tuple[tuple[Setting, UserSetting], ...]
    """Decided by the user: what would have been set, and what stays."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that every process of the NCCL group needs: the advised ones, the user's values first.

        Without those that a configuration file sets, which NCCL reads by itself.
        """
        kept = {user.name: user.value for _, user in self.kept if user.where == ENVIRONMENT}
        return kept | {setting.name: setting.value for setting in self.to_set}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is set, why, how to undo it and who else needs it; what stays as the user has it; what is not known."""
        own = (self._what_is_set(),) if self.to_set else ()
        others = tuple(_what_stays(setting, user) for setting, user in self.kept if user.value != setting.value)
        return own + others + self.decision.notes

    def runtime_env(self) -> dict[str, dict[str, str]]:
        """Return the `runtime_env` for `ray.init` or an actor: Ray's workers do not inherit what the driver sets."""
        return {"env_vars": self.environment}

    def assignments(self) -> str:
        """Return `environment` as a shell writes it before a command: "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"."""
        return assignments(self.environment)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON types; a topology is what a bug report needs."""
        return {
            "reason": self.decision.reason,
            "set": {setting.name: setting.value for setting in self.to_set},
            "kept": [asdict(user) for _, user in self.kept],
            "environment": self.environment,
            "warnings": list(self.warnings),
            "topology": asdict(self.topology),
        }

    def _what_is_set(self) -> str:
        names = {setting.name: setting.value for setting in self.to_set}
        undo = {setting.name: setting.undo for setting in self.to_set}
        effects = "; ".join(f"{setting.name}: {setting.effect}" for setting in self.to_set)
        return (
            f"NCCL needs {assignments(names)} here. Why: {self.decision.reason} What it does: {effects}. "
            f"To undo it, start with {assignments(undo)}: what you set is never overridden. "
            f"vLLM servers that join the same NCCL group need the same: {self.assignments()} vllm serve ..."
        )


def assignments(variables: Mapping[str, str]) -> str:
    """Return variables as a shell writes them before a command."""
    return " ".join(f"{name}={shlex.quote(value) if value else ''}" for name, value in variables.items())


def advise(topology: Topology, user: Mapping[str, UserSetting]) -> NcclAdvice:
    """Return what to set on a host of this topology for a user who has set this. Pure."""
    decision = decide(topology)
    kept = [(setting, theirs) for setting in decision.settings if (theirs := _theirs(setting, user)) is not None]
    to_set = tuple(setting for setting in decision.settings if _theirs(setting, user) is None)
    if (algo := user.get("NCCL_ALGO")) and algo.value.strip().lower() == "tree":
        decision = replace(decision, notes=(*decision.notes, _bare_tree(algo)))
    return NcclAdvice(topology, decision, to_set, tuple(kept))


def configure_nccl_env(environ: MutableMapping[str, str] = os.environ, topology: Topology | None = None) -> NcclAdvice:
    """Set the NCCL variables that this host asks for, and return what was set and why.

    Call it before the first NCCL communicator of the process: NCCL reads its environment once. Child processes
    inherit `environ`; Ray's workers need `NcclAdvice.runtime_env()`, or a call of their own.

    Never overrides what the user has set, in `environ` or in NCCL's configuration files. Never raises for what it
    cannot find out: it warns and sets nothing. Called again, it finds its own settings and changes nothing. Without
    `topology` the host is read (needs the extra `nccl`).
    """
    advice = advise(topology or probe(environ), user_settings(environ))
    environ.update({setting.name: setting.value for setting in advice.to_set})
    for warning in advice.warnings:
        log.warning("%s", warning)
    return advice


def nccl_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this package's concern that are in effect, from wherever they come."""
    names = {setting.name for setting in SETTINGS} | set(ALSO_DECIDED_BY.values())
    return {name: user.value for name, user in user_settings(environ).items() if name in names}


def _theirs(setting: Setting, user: Mapping[str, UserSetting]) -> UserSetting | None:
    return user.get(setting.name) or user.get(ALSO_DECIDED_BY.get(setting.name, ""))


def _what_stays(setting: Setting, user: UserSetting) -> str:
    return (
        f"{user.name}={user.value} from {user.where} stays; without it, "
        f"{setting.name}={setting.value} would be set ({setting.effect})."
    )


def _bare_tree(algo: UserSetting) -> str:
    return (
        f"NCCL_ALGO={algo.value} from {algo.where} leaves broadcast and all-gather without an algorithm: NCCL 2.24 and "
        f"newer fail there. Use NCCL_ALGO={TREE_ALL_REDUCE.value}."
    )
