"""All that can be published arrives in the store as the same two files, or not at all."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.artifacts.check import check_adapter, inspect_directory
from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from proxy.artifacts.manifest import ADAPTER_FILES, MANIFEST_FILE
from proxy.simulator.adapters import lora_config, lora_tensors, write_adapter
from trainer_client.adapters import Adapter, StateDict, gather, opened, packed
from trainer_client.errors import RewindError, StoreError, UnservableError
from trainer_client.fleet import FleetLimits
from trainer_client.publisher import Published, Terms, publish_files
from trainer_client.stores import open_store

RANK = 8


def state_dict(*, seed: int) -> Adapter:
    return lora_tensors(rank=RANK, seed=seed), lora_config(rank=RANK)


def publish(
    adapter: Adapter,
    root: Path,
    *,
    step: int = 1,
    base_model: str | None = None,
    allow_rewind: bool = False,
    max_lora_rank: int | None = None,
    serves_lora: bool | None = None,
) -> Published:
    given = opened(adapter)
    payload = packed(given, gather(given, keep=True) if isinstance(given, StateDict) else {})
    return publish_files(
        payload,
        Terms(step, base_model=base_model, keep_every=None, allow_rewind=allow_rewind),
        store=open_store(root, run="run"),
        limits=FleetLimits(max_lora_rank=max_lora_rank, serves_lora=serves_lora),
        deadline=time.monotonic() + 60,
    )


def policies(root: Path) -> list[str]:
    if not (root / "run").exists():
        return []
    return sorted(path.name for path in (root / "run").iterdir() if path.name != ".lock")


def test_directory_and_state_dict_give_the_same_policy(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", seed=1, rank=RANK)
    adapters: list[Adapter] = [directory, str(directory), state_dict(seed=1)]
    published = [publish(adapter, tmp_path / "store") for adapter in adapters]
    assert len({one.path for one in published}) == 1
    assert adapter_digest(published[0].path) == adapter_digest(directory)


@pytest.mark.parametrize("kind", ["directory", "state dict"])
def test_only_what_vllm_reads_is_published(tmp_path: Path, kind: str) -> None:
    source = write_adapter(tmp_path / "checkpoint", seed=1)
    (source / "optimizer.pt").write_bytes(bytes(100))
    path = publish(source if kind == "directory" else state_dict(seed=1), tmp_path / "store").path
    check_adapter(path)
    assert sorted(file.name for file in path.iterdir()) == sorted([*ADAPTER_FILES, MANIFEST_FILE])


def test_the_manifest_describes_what_is_there(tmp_path: Path) -> None:
    published = publish(state_dict(seed=1), tmp_path)
    found = inspect_directory(published.path)
    manifest = published.manifest
    assert (manifest.files, manifest.digest, manifest.config_digest) == (
        found.files,
        found.digest,
        found.config_digest,
    )


def test_a_config_with_sets_has_the_same_digest_in_every_process(tmp_path: Path) -> None:
    config = {**lora_config(rank=RANK), "target_modules": {"q_proj", "v_proj", "k_proj"}}
    path = publish((lora_tensors(rank=RANK, seed=1), config), tmp_path).path
    assert json.loads((path / CONFIG_FILE).read_text())["target_modules"] == ["k_proj", "q_proj", "v_proj"]


def test_arrays_that_are_views_arrive_whole(tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict(lora_tensors(rank=RANK, seed=1))
    views = {name: np.asfortranarray(tensor) for name, tensor in tensors.items()}
    one = publish((tensors, lora_config(rank=RANK)), tmp_path)
    assert publish((views, lora_config(rank=RANK)), tmp_path).path == one.path


def test_versions_count_up_and_the_name_carries_version_and_digest(tmp_path: Path) -> None:
    first, second = (publish(state_dict(seed=seed), tmp_path, step=seed).manifest for seed in (1, 2))
    assert (first.version, second.version) == (1, 2)
    assert second.name == f"run-v2-{second.digest[:8]}"


def test_the_manifest_tells_where_the_weights_come_from(tmp_path: Path) -> None:
    manifest = publish(state_dict(seed=1), tmp_path, step=40).manifest
    assert (manifest.run, manifest.step, manifest.base_model) == ("run", 40, "sim")
    assert publish(state_dict(seed=2), tmp_path, step=41, base_model="me/it").manifest.base_model == "me/it"


def test_weights_that_come_back_after_others_are_a_new_policy(tmp_path: Path) -> None:
    names = [publish(state_dict(seed=seed), tmp_path).manifest.name for seed in (1, 2, 1)]
    assert len(set(names)) == 3


def test_a_lower_step_is_refused_unless_allowed(tmp_path: Path) -> None:
    newest = publish(state_dict(seed=1), tmp_path, step=40).manifest.name
    with pytest.raises(RewindError, match=f"step 39 is before step 40 of {newest}"):
        publish(state_dict(seed=2), tmp_path, step=39)
    assert policies(tmp_path) == [newest]
    assert publish(state_dict(seed=2), tmp_path, step=39, allow_rewind=True).manifest.version == 2


def test_what_cannot_be_served_is_not_published(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "adapter", seed=1, rank=RANK)
    weights = source / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(
        UnservableError, match=rf"adapter {source} \(step 1\) cannot be served: {WEIGHTS_FILE}.*truncated"
    ):
        publish(source, tmp_path / "store")
    assert policies(tmp_path / "store") == []


def test_nan_in_a_state_dict_names_the_tensor(tmp_path: Path) -> None:
    tensors = lora_tensors(rank=RANK, seed=1)
    name = next(iter(tensors))
    tensors[name][0, 0] = np.nan
    with pytest.raises(UnservableError, match=rf"the given state dict \(step 1\).*{name} has values that are NaN"):
        publish((tensors, lora_config(rank=RANK)), tmp_path)


def test_a_rank_above_any_vllm_is_refused(tmp_path: Path) -> None:
    config = {**lora_config(rank=RANK), "rank_pattern": {"none": 513}}
    with pytest.raises(UnservableError, match="rank 513 is above 512"):
        publish((lora_tensors(rank=RANK, seed=1), config), tmp_path)


@pytest.mark.parametrize("missing", ADAPTER_FILES)
def test_a_directory_that_holds_no_adapter_is_named(tmp_path: Path, missing: str) -> None:
    source = write_adapter(tmp_path / "adapter", seed=1)
    (source / missing).unlink()
    with pytest.raises(UnservableError, match=rf"{source}/{missing} is missing"):
        publish(source, tmp_path / "store")


def test_tensors_of_another_library_are_refused_with_the_remedy(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"x.lora_A.weight": [[1.0]]}
    with pytest.raises(UnservableError, match=r"x\.lora_A\.weight is a list; give arrays of numpy"):
        publish((tensors, lora_config(rank=RANK)), tmp_path)


def test_what_is_no_adapter_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnservableError, match="a dict cannot be published; give a PeftModel, a directory"):
        publish({}, tmp_path)  # type: ignore[arg-type]


def test_the_fleets_rank_counts(tmp_path: Path) -> None:
    with pytest.raises(UnservableError, match=r"rank 8 is above 4.*it could be served merged"):
        publish(state_dict(seed=1), tmp_path, max_lora_rank=4)


def test_a_fleet_without_lora_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UnservableError, match=r"run without LoRA \(start them with --enable-lora\).*served merged"):
        publish(state_dict(seed=1), tmp_path, serves_lora=False)
    assert policies(tmp_path) == []


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"store {tmp_path}/file/run cannot be used"):
        publish(state_dict(seed=1), tmp_path / "file")
