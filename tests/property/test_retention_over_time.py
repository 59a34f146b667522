"""For any history of publications, kills, restarts and rollouts: names never repeat, and no needed file goes."""

from __future__ import annotations

import time
import uuid
from contextlib import nullcontext, suppress
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.artifacts.manifest import MANIFEST_FILE
from proxy.contract import PolicyStatus
from proxy.simulator.adapters import lora_config, lora_tensors
from tests.support.stores import files_of
from trainer_client.adapters import StateDict, packed
from trainer_client.errors import ProxyError
from trainer_client.fleet import FleetLimits
from trainer_client.policies import is_checkpoint, version_in
from trainer_client.publisher import Published, Terms, publish_files
from trainer_client.retention import Retention
from trainer_client.slots import max_loras
from trainer_client.stores import open_store

PAYLOADS = [packed(StateDict("tensors", {}, lora_config(rank=1)), lora_tensors(rank=1, seed=seed)) for seed in range(6)]


class ModelProxy:
    """What the rules ask of the proxy: who is loaded, and who has rollouts in flight."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.leased: set[str] = set()
        self.fails = False

    def needed(self) -> set[str]:
        """Return the policies whose files some replica may still read."""
        loaded = {name for name, state in self.states.items() if state in ("live", "retiring")}
        return loaded | self.leased

    def statuses(self) -> tuple[PolicyStatus, ...]:
        return tuple(self._status(name) for name in self.states)

    def status(self, name: str) -> PolicyStatus | None:
        return self._status(name) if name in self.states else None

    def unload(self, name: str) -> bool:
        if self.fails:
            raise ProxyError("no answer")
        if name in self.states:
            self.states[name] = "retiring"
            self.settle()
        return name in self.states

    def settle(self) -> None:
        for name, state in self.states.items():
            if state == "retiring" and name not in self.leased:
                self.states[name] = "retired"

    def restart(self) -> None:
        self.states = dict.fromkeys(self.needed(), "live")  # adopted from the replicas

    def _status(self, name: str) -> PolicyStatus:
        state = self.states[name]
        gone = state == "retired"
        facts = {"path": "", "version": None, "leases": 0, "held_by": (), "files_deletable": gone}
        return PolicyStatus.model_validate({"name": name, "state": state, **facts})


class History(RuleBasedStateMachine):
    """One run in a store that it shares with another run."""

    @initialize(staleness=st.integers(0, 2), keep_every=st.sampled_from([None, 1, 2, 3]))
    def begin(self, staleness: int, keep_every: int | None) -> None:
        self.staleness, self.keep_every = staleness, keep_every
        self.url = f"memory://{uuid.uuid4().hex}"
        self.proxy = ModelProxy()
        self.step = 0
        self.published: dict[str, str] = {}
        self.versions: list[int] = []
        self.open()
        self.theirs = self._publish("run-v1", PAYLOADS[0])

    @rule()
    def open(self) -> None:
        """A new process of the trainer."""
        self.store = open_store(self.url, run="run", mount="/lora")
        self.retention = Retention(self.store, cast(Any, self.proxy), max_staleness=self.staleness)

    @rule(which=st.integers(0, len(PAYLOADS) - 1), end=st.sampled_from(["live", "live", "live", "killed", "no answer"]))
    def publish(self, which: int, end: str) -> None:
        """Publish; the trainer may be killed before it tells the proxy, or the proxy may not answer afterwards."""
        self.step += 1
        manifest = self._publish("run", PAYLOADS[which]).manifest
        if manifest.name not in self.published:
            assert manifest.version > max(self.versions, default=0), "numbering went back"
            self.versions.append(manifest.version)
        assert self.published.setdefault(manifest.name, manifest.digest) == manifest.digest
        if end != "killed":
            self.proxy.states[manifest.name] = "live"
            self.proxy.fails = end == "no answer"
            with suppress(ProxyError) if self.proxy.fails else nullcontext():
                self.retention.retire()

    @rule(size=st.integers(0, 1))
    def be_killed_while_writing(self, size: int) -> None:
        """Leave a version's files without a manifest."""
        version = max([0, *self.store.contents().versions]) + 1
        files_of(self.store).add(f"run-v{version}-0badf00d", {"adapter_config.json": b"{}"[: 2 * size]})

    @rule()
    def collect_garbage(self) -> None:
        shown = {garbage.folder for garbage in self.retention.collect(dry_run=True, min_age_s=0)}
        removed = {garbage.folder for garbage in self.retention.collect(dry_run=False, min_age_s=0)}
        assert shown == removed
        assert not self.store.contents().unfinished

    @rule(which=st.integers(0, 8))
    def begin_rollout(self, which: int) -> None:
        if needed := sorted(self.proxy.needed()):
            self.proxy.leased.add(needed[which % len(needed)])

    @rule()
    def end_rollouts(self) -> None:
        self.proxy.leased.clear()
        self.proxy.settle()

    @rule()
    def restart_the_proxy(self) -> None:
        self.proxy.restart()

    @invariant()
    def no_file_that_somebody_needs_is_gone(self) -> None:
        missing = self.proxy.needed() - self._complete("run")
        assert not missing, f"deleted under a replica or a rollout: {missing}"

    @invariant()
    def checkpoints_and_the_newest_stay(self) -> None:
        versions = {version_in("run", name): name for name in self.published}
        kept = {name for version, name in versions.items() if is_checkpoint(version or 0, keep_every=self.keep_every)}
        newest = {versions[max(version for version in versions if version)]} if versions else set()
        assert kept | newest <= self._complete("run")

    @invariant()
    def what_another_run_owns_is_untouched(self) -> None:
        assert self._complete("run-v1") == {self.theirs.manifest.name}

    def teardown(self) -> None:
        if not hasattr(self, "retention"):
            return
        self.end_rollouts()
        for which in (0, 1, 0):
            self.publish(which, "live")
        self.collect_garbage()
        contents = self.store.contents()
        newest = contents.newest
        assert newest
        for manifest in contents.manifests:
            in_window = newest.version - manifest.version <= self.staleness
            assert in_window or is_checkpoint(manifest.version, keep_every=self.keep_every), manifest.name
        live = [name for name, state in self.proxy.states.items() if state == "live"]
        assert len(live) < max_loras(self.staleness)

    def _publish(self, run: str, payload: Any) -> Published:
        store = self.store if run == "run" else open_store(self.url, run=run, mount="/lora")
        terms = Terms(self.step, base_model=None, keep_every=self.keep_every, allow_rewind=False)
        return publish_files(payload, terms, store=store, limits=FleetLimits(), deadline=time.monotonic() + 60)

    def _complete(self, run: str) -> set[str]:
        listed = files_of(open_store(self.url, run=run, mount="/lora")).list()
        return {folder for folder, files in listed.items() if MANIFEST_FILE in files and len(files) >= 3}


TestHistory = History.TestCase
TestHistory.settings = settings(stateful_step_count=30, deadline=None)

pytestmark = pytest.mark.timeout(120)


@given(payloads=st.lists(st.integers(0, 2), min_size=1, max_size=10), staleness=st.integers(0, 3))
def test_what_trl_still_asks_for_is_live(payloads: list[int], staleness: int) -> None:
    """TRL counts syncs, also those that change nothing, and asks for the last `staleness` + 1 of them by alias."""
    proxy = ModelProxy()
    store = open_store(f"memory://{uuid.uuid4().hex}", run="run", mount="/lora")
    retention = Retention(store, cast(Any, proxy), max_staleness=staleness)
    named: list[str] = []
    for sync, which in enumerate(payloads, start=1):
        terms = Terms(sync, base_model=None, keep_every=None, allow_rewind=False, alias=f"v{sync}")
        published = publish_files(
            PAYLOADS[which], terms, store=store, limits=FleetLimits(), deadline=time.monotonic() + 60
        )
        named.append(published.manifest.name)
        proxy.states[named[-1]] = "live"
        live = retention.retire()
        asked_for = named[-staleness - 1 :]
        assert [proxy.states[name] for name in asked_for] == ["live"] * len(asked_for)
        assert live == len(asked_for)
        assert {manifest.alias for manifest in store.contents().manifests} >= {
            f"v{sync - n}" for n in range(len(asked_for))
        }
