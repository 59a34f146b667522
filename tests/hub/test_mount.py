"""A mounted bucket is late, torn and silent in the ways in which hf-mount is."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi
from safetensors.numpy import load_file, save_file

from tests.hub.conftest import BUCKET
from tests.hub.mount import FLUSH_DEBOUNCE_S, NEGATIVE_TTL_S, NEWER_NEGATIVE_TTL_S, WITHOUT_FUSE, BucketMount
from tests.hub.offline_hub import OfflineHub
from tests.support.replicas import wait_until
from tests.support.tiny_model import REPO

pytestmark = pytest.mark.skipif(WITHOUT_FUSE is not None, reason=str(WITHOUT_FUSE))

Mounts = Callable[..., Path]
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def mount(hub: OfflineHub, api: HfApi, tmp_path: Path) -> Iterator[Mounts]:
    """Return a function that mounts BUCKET once more."""
    with ExitStack() as stack:

        def another(**options: Any) -> Path:
            directory = tmp_path / f"mount-{time.monotonic_ns()}"
            options = {"negative_ttl_s": NEWER_NEGATIVE_TTL_S, "flush_debounce_s": 0.2, **options}
            return stack.enter_context(BucketMount(hub, BUCKET, directory, **options))

        yield another


def _on_hub(api: HfApi) -> list[str]:
    return [entry.path for entry in api.list_bucket_tree(BUCKET, recursive=True) if entry.type == "file"]


def _wait_on_hub(api: HfApi, *paths: str) -> None:
    wait_until(lambda: _on_hub(api) == sorted(paths), limit_s=10, what=f"the Hub lists {paths}")


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())


def test_files_of_the_hub_are_read_as_they_are(api: HfApi, mount: Mounts) -> None:
    content = random.Random(5).randbytes(3_000_000)
    api.batch_bucket_files(BUCKET, add=[(content, "v1/deep/noise.bin"), (b"", "v1/empty"), (b"x", "v10")])
    lora = mount(read_only=True)
    assert sorted(str(path.relative_to(lora)) for path in lora.rglob("*")) == [
        *("v1", "v1/deep", "v1/deep/noise.bin", "v1/empty", "v10")
    ]
    assert (lora / "v1/deep/noise.bin").read_bytes() == content
    assert (lora / "v1/empty").read_bytes() == b""
    with (lora / "v1/deep/noise.bin").open("rb") as file:
        file.seek(1_234_567)
        assert file.read(1000) == content[1_234_567:1_235_567]
    assert not (lora / "v").exists()


def test_tensors_saved_through_one_mount_are_loaded_through_another(api: HfApi, mount: Mounts) -> None:
    writer = mount()
    tensors = {"lora_A": np.random.default_rng(1).normal(size=(64, 4096)).astype(np.float32)}
    (writer / "v1").mkdir()
    save_file(tensors, writer / "v1" / _WEIGHTS)
    _wait_on_hub(api, f"v1/{_WEIGHTS}")
    loaded = load_file(mount(read_only=True) / "v1" / _WEIGHTS)
    assert np.array_equal(loaded["lora_A"], tensors["lora_A"])


def test_a_lookup_that_came_too_early_is_remembered(api: HfApi, mount: Mounts) -> None:
    early, patient = mount(negative_ttl_s=2.0), mount(negative_ttl_s=2.0)
    looked_at = time.monotonic()
    assert not (early / "v1" / _CONFIG).exists()
    api.batch_bucket_files(BUCKET, add=[(b"{}", f"v1/{_CONFIG}")])
    assert (patient / "v1" / _CONFIG).exists()
    assert not (early / "v1" / _CONFIG).exists()
    wait_until((early / "v1" / _CONFIG).exists, limit_s=5)
    assert 2.0 <= time.monotonic() - looked_at < 4.0


def test_the_memory_of_the_published_version_lasts_longer_than_a_landing(
    hub: OfflineHub, api: HfApi, mount: Mounts
) -> None:
    lora = mount(negative_ttl_s=NEGATIVE_TTL_S)
    assert not (lora / "v1" / _CONFIG).exists()
    hub.set_faults(landing_s=1.0)
    api.batch_bucket_files(BUCKET, add=[(b"{}", f"v1/{_CONFIG}"), (b"{}", f"v2/{_CONFIG}")])
    _wait_on_hub(api, f"v1/{_CONFIG}", f"v2/{_CONFIG}")
    assert (lora / "v2" / _CONFIG).exists()
    assert not (lora / "v1" / _CONFIG).exists()


def test_a_directory_that_lands_torn_is_seen_torn(hub: OfflineHub, api: HfApi, mount: Mounts) -> None:
    lora = mount()
    hub.set_faults(landing_of={"*.safetensors": 1.0})
    api.batch_bucket_files(BUCKET, add=[(b"{}", f"v1/{_CONFIG}"), (b"w", f"v1/{_WEIGHTS}")])
    assert (lora / "v1" / _CONFIG).exists()
    assert not (lora / "v1" / _WEIGHTS).exists()
    wait_until((lora / "v1" / _WEIGHTS).exists, limit_s=5)


def test_what_is_written_goes_up_some_time_after_its_close(api: HfApi, mount: Mounts) -> None:
    lora = mount(flush_debounce_s=1.0)
    (lora / "v1").mkdir()
    _write(lora / "v1" / _CONFIG, b"{}")
    closed_at = time.monotonic()
    assert _on_hub(api) == []
    assert (lora / "v1" / _CONFIG).read_bytes() == b"{}"
    _wait_on_hub(api, f"v1/{_CONFIG}")
    assert time.monotonic() - closed_at >= 1.0


def test_a_file_goes_up_only_after_its_last_close(hub: OfflineHub, api: HfApi, mount: Mounts) -> None:
    lora = mount(flush_debounce_s=0)
    with (lora / "half").open("wb") as half:
        os.truncate(lora / "half", 3)
        _write(lora / "other", b"x")
        _wait_on_hub(api, "other")
        half.write(b"whole")
    _wait_on_hub(api, "half", "other")
    assert [info.size for info in api.get_bucket_paths_info(BUCKET, ["half"])] == [5]


def test_an_empty_directory_is_only_here(api: HfApi, mount: Mounts) -> None:
    writer, reader = mount(), mount()
    (writer / "v1").mkdir()
    assert (writer / "v1").is_dir()
    assert not (reader / "v1").exists()
    (writer / "v1").rmdir()
    assert not (writer / "v1").exists()


def test_a_renamed_directory_is_torn_for_a_reader_elsewhere(api: HfApi, mount: Mounts) -> None:
    writer, reader = mount(flush_debounce_s=FLUSH_DEBOUNCE_S), mount()
    (writer / ".staged").mkdir()
    _write(writer / ".staged" / _CONFIG, b"{}")
    _wait_on_hub(api, f".staged/{_CONFIG}")
    _write(writer / ".staged" / _WEIGHTS, b"weights")
    (writer / ".staged").rename(writer / "v1")
    assert sorted(path.name for path in (writer / "v1").iterdir()) == [_CONFIG, _WEIGHTS]
    assert not (writer / ".staged").exists()
    assert (reader / "v1" / _CONFIG).exists()
    assert not (reader / "v1" / _WEIGHTS).exists()
    _wait_on_hub(api, f"v1/{_CONFIG}", f"v1/{_WEIGHTS}")
    wait_until((reader / "v1" / _WEIGHTS).exists, limit_s=5)
    assert (reader / "v1" / _WEIGHTS).read_bytes() == b"weights"


def test_a_file_is_renamed_over_another(api: HfApi, mount: Mounts) -> None:
    lora = mount()
    _write(lora / "manifest", b"old")
    _write(lora / "manifest.part", b"newer")
    (lora / "manifest.part").replace(lora / "manifest")
    assert (lora / "manifest").read_bytes() == b"newer"
    _wait_on_hub(api, "manifest")
    assert (mount() / "manifest").read_bytes() == b"newer"


def test_a_changed_file_is_renamed_before_it_goes_up(api: HfApi, mount: Mounts) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"old", "manifest.part")])
    lora = mount()
    _write(lora / "manifest.part", b"newer")
    (lora / "manifest.part").rename(lora / "manifest")
    assert not (lora / "manifest.part").exists()
    _wait_on_hub(api, "manifest")
    assert (mount() / "manifest").read_bytes() == b"newer"


def test_an_upload_that_failed_is_told_once_and_not_tried_again(hub: OfflineHub, api: HfApi, mount: Mounts) -> None:
    lora = mount()
    hub.set_faults(refused={"*": 1})
    _write(lora / "lost", b"x")
    batch = f"POST /api/buckets/{BUCKET}/batch"
    wait_until(lambda: batch in hub.calls, what="the mount tries to send it")
    _write(lora / "later", b"x")
    _wait_on_hub(api, "later")
    with pytest.raises(OSError, match="lost") as raised:
        (lora / "lost").open("rb").close()
    assert raised.value.errno == errno.EIO
    assert (lora / "lost").read_bytes() == b"x"
    assert hub.calls.count(batch) == 2


def test_a_file_that_was_read_stays_as_it_was_for_a_while(api: HfApi, mount: Mounts) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"old", "file")])
    reader = mount()
    assert (reader / "file").read_bytes() == b"old"
    api.batch_bucket_files(BUCKET, add=[(b"newer", "file")])
    assert (reader / "file").read_bytes() == b"old"
    assert (mount() / "file").read_bytes() == b"newer"


def test_files_are_changed_and_removed(api: HfApi, mount: Mounts) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"one", "log"), (b"x", "old")])
    lora = mount()
    with (lora / "log").open("ab") as log:
        log.write(b" two")
    (lora / "old").unlink()
    assert not (lora / "old").exists()
    _wait_on_hub(api, "log")
    wait_until(lambda: [info.size for info in api.get_bucket_paths_info(BUCKET, ["log"])] == [7], limit_s=5)
    assert (mount() / "log").read_bytes() == b"one two"


def test_a_read_only_mount_refuses_to_write(api: HfApi, mount: Mounts) -> None:
    api.batch_bucket_files(BUCKET, add=[(b"x", "file")])
    lora = mount(read_only=True)
    with pytest.raises(OSError, match="Read-only") as raised:
        (lora / "new").write_bytes(b"")
    assert raised.value.errno == errno.EROFS
    with pytest.raises(OSError, match="Read-only"):
        (lora / "file").unlink()


@pytest.mark.parametrize("killed", [False, True], ids=["unmounted", "killed"])
def test_what_has_not_gone_up_is_lost_only_if_the_mount_is_killed(
    hub: OfflineHub, api: HfApi, tmp_path: Path, killed: bool
) -> None:
    bucket_mount = BucketMount(hub, BUCKET, tmp_path / "lora", flush_debounce_s=30)
    with bucket_mount as lora:
        _write(lora / "file", b"x")
        if killed:
            bucket_mount.kill()
    assert _on_hub(api) == ([] if killed else ["file"])


_BE_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.hub.mount import BucketMount
from tests.hub.offline_hub import OfflineHub
with OfflineHub() as hub:
    hub.api().create_bucket("tester/runs")
    with BucketMount(hub, "tester/runs", Path(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_stays_mounted_when_a_test_is_killed(tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    command = [sys.executable, "-c", _BE_KILLED, str(lora)]
    killed = subprocess.run(command, cwd=REPO, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=15, check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_until(lambda: not lora.is_mount(), what=f"{lora} is unmounted")
    assert list(lora.iterdir()) == []
