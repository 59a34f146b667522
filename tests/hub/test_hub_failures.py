"""Publishers are killed and the Hub fails: what a reader sees is whole and right, and what is left is cleared away."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field

import httpx2
import pytest
from huggingface_hub import BucketFile, HfApi

from proxy.artifacts.bucket import BucketFolder
from proxy.artifacts.check import inspect_directory
from proxy.artifacts.manifest import MANIFEST_FILE, Manifest, parse_manifest
from proxy.simulator.adapters import write_adapter
from tests.hub.conftest import BUCKET
from tests.hub.faults import Answer
from tests.hub.offline_hub import OfflineHub
from tests.support.fake_proxy import FakeProxy
from tests.support.killed_publisher import RANK, publish
from tests.support.tiny_model import REPO
from trainer_client import TrainerClient

STORE = f"hf://buckets/{BUCKET}/lora"
SEED = 20
KILLS = 30

RUNS, EACH = 10, 10
"""A call that failed is repeated a second later: runs that wait side by side take no longer than one."""


@dataclass
class Reader:
    """Looks at every policy in the bucket again and again, and trusts only manifests."""

    api: HfApi
    run: BucketFolder
    looks: int = 0
    seen: dict[str, Manifest] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> None:
        """Look until stopped."""
        while not self.stopped.wait(0.01):
            self.look()

    def look(self) -> None:
        """Hold every published policy to its manifest, which is read only once: an object never changes."""
        entries = self.api.list_bucket_tree(BUCKET, f"{self.run.path}/", recursive=True)
        listed = {entry.path: entry for entry in entries if isinstance(entry, BucketFile)}
        for path in listed:
            if path.endswith(MANIFEST_FILE):
                self.looks += 1
                self._judge(path, listed)

    def _judge(self, path: str, listed: dict[str, BucketFile]) -> None:
        folder = path.split("/")[-2]
        if folder not in self.seen:
            answer = _download(self.api, path)
            if answer is None:
                return  # deleted meanwhile, manifest first
            self.seen[folder] = parse_manifest(answer, source=path)
        for file in self.seen[folder].files:
            there = listed.get(self.run.child(folder).file(file.path))
            if there is None or (there.size, there.xet_hash) != (file.size, file.xet_hash):
                self.wrong.append(f"{folder}/{file.path} is {there}")


def _download(api: HfApi, path: str) -> bytes | None:
    answer = httpx2.get(
        f"{api.endpoint}/buckets/{BUCKET}/resolve/{path}", headers={"authorization": f"Bearer {api.token}"}
    )
    return answer.content if answer.status_code == 200 else None


def _folders(api: HfApi, root: str = "lora") -> dict[str, set[str]]:
    """Return the names in each policy's folder."""
    found: dict[str, set[str]] = {}
    for entry in api.list_bucket_tree(BUCKET, f"{root}/", recursive=True):
        if isinstance(entry, BucketFile):
            folder, _, name = entry.path.rpartition("/")
            found.setdefault(folder, set()).add(name)
    return found


def _expected(manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return inspect_directory(write_adapter(tmp_path_factory.mktemp("a") / "x", seed=manifest.step, rank=RANK)).digest


@pytest.mark.timeout(120)
def test_no_reader_sees_half_a_policy_and_the_next_publication_repairs(
    hub_of_this_process: OfflineHub, api: HfApi, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hub_of_this_process.set_faults(landing_of={"*.safetensors": 0.3})
    reader = Reader(api, BucketFolder.parse(STORE).child("run"))
    reading = threading.Thread(target=reader.poll)
    with FakeProxy(sees_files=False) as proxy:
        reading.start()
        try:
            command = [sys.executable, "-m", "tests.support.killed_publisher", proxy.url, STORE, str(KILLS), str(SEED)]
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=100)
            publish(proxy.url, STORE, step=KILLS + 1)
        finally:
            reader.stopped.set()
            reading.join()
        reader.look()
        assert done.returncode == 0, done.stderr
        ends = json.loads(done.stdout)
        assert ends["killed"] >= KILLS // 2, ends
        assert set(ends) <= {"killed", "0"}, f"a publisher failed that was not killed: {done.stderr}"
        assert reader.wrong == []
        assert reader.looks > KILLS
        by_version = sorted(reader.seen.values(), key=lambda manifest: manifest.version)
        assert [manifest.step for manifest in by_version] == sorted({manifest.step for manifest in by_version})
        for manifest in by_version:
            assert manifest.digest == _expected(manifest, tmp_path_factory)
        assert by_version[-1].step == KILLS + 1
        with TrainerClient(proxy.url, store=STORE, mount="/lora", run="run", max_staleness=1) as client:
            client.gc(min_age_s=0)
        left = _folders(api)
        assert all(MANIFEST_FILE in names for names in left.values())
        assert {folder.rpartition("/")[2] for folder in left} >= set(proxy.live)


@pytest.mark.timeout(150)
def test_a_hub_that_fails_every_fifth_call_loses_nothing(hub_of_this_process: OfflineHub, api: HfApi) -> None:
    hub = hub_of_this_process
    hub.set_faults(answers=[Answer(502, share=0.05, carried_out=True), Answer(503, share=0.16)], landing_s=0.05)
    with FakeProxy(sees_files=False) as proxy:
        module = [sys.executable, "-m", "tests.support.many_publications", proxy.url, STORE, "/lora"]
        processes = [
            subprocess.Popen(
                [*module, f"run-{number}", str(EACH)], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for number in range(RUNS)
        ]
        became = [json.loads(process.communicate(timeout=140)[0]) for process in processes]
        hub.set_faults(answers=[])
        failed = [why for run in became for why in run if why is not None]
        assert all("hf://buckets/tester/runs" in why or "503" in why or "502" in why for why in failed), failed
        assert len(failed) <= RUNS * EACH // 10, failed
        for number in range(RUNS):
            with TrainerClient(proxy.url, store=STORE, mount="/lora", run=f"run-{number}", max_staleness=1) as client:
                client.gc(min_age_s=0)
        left = _folders(api)
        assert all(MANIFEST_FILE in names for names in left.values()), left
        assert {folder.rpartition("/")[2] for folder in left} >= set(proxy.live)
