"""All that can be published arrives in the store as the same two files, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.artifacts.digest import CONFIG_FILE, WEIGHTS_FILE, adapter_digest
from proxy.artifacts.manifest import ADAPTER_FILES, MANIFEST_FILE
from proxy.artifacts.weights import check_adapter
from proxy.simulator.adapters import lora_config, lora_tensors, write_adapter
from trainer_client.errors import RewindError, StoreError, UnservableError
from trainer_client.publisher import Adapter, Published, publish_files
from trainer_client.stores import DirectoryStore

RANK = 8


class FakePeftModel:
    """Saves as peft does: the default adapter, a model card, and a second adapter in a folder of its own."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def save_pretrained(self, save_directory: str, *, safe_serialization: bool) -> None:
        assert safe_serialization
        directory = Path(save_directory)
        write_adapter(directory, seed=self._seed)
        write_adapter(directory / "ref", seed=0)
        (directory / "README.md").write_text("model card")


class Interrupted:
    """A model whose saving is interrupted half-way."""

    def save_pretrained(self, save_directory: str, *, safe_serialization: bool) -> None:
        (Path(save_directory) / CONFIG_FILE).write_text("{")
        raise KeyboardInterrupt


def publish(
    adapter: Adapter, root: Path, *, step: int = 1, base_model: str | None = None, allow_rewind: bool = False
) -> Published:
    store = DirectoryStore(root, run="run")
    with store.claim():
        return publish_files(adapter, store=store, step=step, base_model=base_model, allow_rewind=allow_rewind)


def policies(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "run").iterdir() if path.name != ".lock")


def test_directory_model_and_state_dict_give_the_same_policy(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", seed=1, rank=RANK)
    state_dict = (lora_tensors(rank=RANK, seed=1), lora_config(rank=RANK))
    adapters: list[Adapter] = [directory, str(directory), FakePeftModel(seed=1), state_dict]
    published = [publish(adapter, tmp_path / "store") for adapter in adapters]
    assert len({one.path for one in published}) == 1
    assert adapter_digest(published[0].path) == adapter_digest(directory)


@pytest.mark.parametrize("kind", ["directory", "model", "state dict"])
def test_only_what_vllm_reads_is_published(tmp_path: Path, kind: str) -> None:
    source = write_adapter(tmp_path / "checkpoint", seed=1)
    (source / "optimizer.pt").write_bytes(bytes(100))
    adapter: Adapter = {
        "directory": source,
        "model": FakePeftModel(seed=1),
        "state dict": (lora_tensors(rank=RANK, seed=1), lora_config(rank=RANK)),
    }[kind]  # type: ignore[assignment]
    path = publish(adapter, tmp_path / "store").path
    check_adapter(path)
    assert sorted(file.name for file in path.iterdir()) == sorted([*ADAPTER_FILES, MANIFEST_FILE])


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
    first, second = (publish(FakePeftModel(seed=seed), tmp_path, step=seed).manifest for seed in (1, 2))
    assert (first.version, second.version) == (1, 2)
    assert second.name == f"run-v2-{second.digest[:8]}"


def test_the_manifest_tells_where_the_weights_come_from(tmp_path: Path) -> None:
    manifest = publish(FakePeftModel(seed=1), tmp_path, step=40).manifest
    assert (manifest.run, manifest.step, manifest.base_model) == ("run", 40, "sim")
    assert publish(FakePeftModel(seed=2), tmp_path, step=41, base_model="me/it").manifest.base_model == "me/it"


def test_weights_that_come_back_after_others_are_a_new_policy(tmp_path: Path) -> None:
    names = [publish(FakePeftModel(seed=seed), tmp_path).manifest.name for seed in (1, 2, 1)]
    assert len(set(names)) == 3


def test_a_lower_step_is_refused_unless_allowed(tmp_path: Path) -> None:
    newest = publish(FakePeftModel(seed=1), tmp_path, step=40).manifest.name
    with pytest.raises(RewindError, match=f"step 39 is before step 40 of {newest}"):
        publish(FakePeftModel(seed=2), tmp_path, step=39)
    assert policies(tmp_path) == [newest]
    assert publish(FakePeftModel(seed=2), tmp_path, step=39, allow_rewind=True).manifest.version == 2


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
    with pytest.raises(UnservableError, match=r"x\.lora_A\.weight is a list; give numpy arrays"):
        publish((tensors, lora_config(rank=RANK)), tmp_path)


def test_an_interrupted_publication_leaves_nothing_and_the_next_works(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        publish(Interrupted(), tmp_path)
    assert policies(tmp_path) == []
    assert publish(FakePeftModel(seed=1), tmp_path).manifest.version == 1


def test_a_full_disk_or_the_like_names_the_store(tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, save_directory: str, *, safe_serialization: bool) -> None:
            raise OSError(28, "No space left on device", save_directory)

    with pytest.raises(StoreError, match=rf"store {tmp_path} cannot be used: .*No space left on device"):
        publish(Full(), tmp_path)
    assert policies(tmp_path) == []
