"""The publisher is killed at random points while a reader polls the store: what it sees is whole, and the right one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from proxy.artifacts.check import inspect_directory
from proxy.artifacts.manifest import MANIFEST_FILE, Manifest, read_manifest
from proxy.errors import ArtifactError
from proxy.simulator.adapters import write_adapter
from tests.support.fake_proxy import FakeProxy
from tests.support.killed_publisher import RANK, publish
from tests.support.tiny_model import REPO
from trainer_client import TrainerClient

PUBLICATIONS = 50
SEED = 20


@dataclass
class Reader:
    """Looks at every policy in the store again and again, as a replica might, until it is stopped."""

    directory: Path
    looks: int = 0
    seen: dict[str, Manifest] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Poll until stopped."""
        while not self.stopped.is_set():
            with suppress(FileNotFoundError):
                for path in self.directory.iterdir():
                    if (path / MANIFEST_FILE).exists():
                        self.look_at(path)

    def look_at(self, path: Path) -> None:
        """Read a policy whole, and hold it to its manifest and to what was seen of it before."""
        self.looks += 1
        try:
            manifest = read_manifest(path)
            found = inspect_directory(path)
        except ArtifactError as error:
            if (path / MANIFEST_FILE).exists():  # else it is being deleted, manifest first
                self.wrong.append(f"{path.name} is torn: {error}")
            return
        if (found.files, found.digest) != (manifest.files, manifest.digest) or found.verdict.reasons:
            self.wrong.append(f"{path.name} is not what its manifest says")
        if self.seen.setdefault(path.name, manifest) != manifest:
            self.wrong.append(f"{path.name} has changed")


@pytest.mark.timeout(120)
def test_no_reader_sees_half_a_policy_and_the_next_publication_repairs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    reader = Reader(store / "run")
    reading = threading.Thread(target=reader.run)
    with FakeProxy() as proxy:
        reading.start()
        try:
            command = [sys.executable, "-m", "tests.support.killed_publisher", proxy.url, str(store)]
            done = subprocess.run(
                [*command, str(PUBLICATIONS), str(SEED)], cwd=REPO, capture_output=True, text=True, timeout=100
            )
            publish(proxy.url, str(store), step=PUBLICATIONS + 1)
        finally:
            reader.stopped.set()
            reading.join()
        assert done.returncode == 0, done.stderr
        ends = json.loads(done.stdout)
        assert ends["killed"] >= PUBLICATIONS // 2, ends
        assert set(ends) <= {"killed", "0"}, f"a publisher failed that was not killed: {done.stderr}"
        assert reader.wrong == []
        assert reader.looks > PUBLICATIONS
        _assert_right_weights(reader, tmp_path)

        last = max(reader.seen.values(), key=lambda manifest: manifest.version)
        newest = [read_manifest(path.parent) for path in store.glob(f"run/*/{MANIFEST_FILE}")]
        assert max(newest, key=lambda manifest: manifest.version).step == PUBLICATIONS + 1
        assert last.version <= PUBLICATIONS + 1
        with TrainerClient(proxy.url, store=store, run="run", max_staleness=1) as client:
            client.gc(min_age_s=0)
            left = {path.name for path in (store / "run").iterdir() if path.is_dir()}
            assert left == {path.parent.name for path in store.glob(f"run/*/{MANIFEST_FILE}")}
            assert set(proxy.live) <= left, "a policy that is served has lost its files"


def _assert_right_weights(reader: Reader, tmp_path: Path) -> None:
    """Versions and steps go up together, and each policy holds the weights of its step."""
    by_version = sorted(reader.seen.values(), key=lambda manifest: manifest.version)
    steps = [manifest.step for manifest in by_version]
    assert steps == sorted(set(steps))
    assert len({manifest.version for manifest in by_version}) == len(by_version)
    for manifest in by_version:
        expected = write_adapter(tmp_path / f"step-{manifest.step}", seed=manifest.step, rank=RANK)
        assert manifest.files[1].sha256 == inspect_directory(expected).files[1].sha256
