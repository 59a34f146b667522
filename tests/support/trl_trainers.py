"""Stand-ins for TRL's AsyncGRPOTrainer where TRL is not installed: the parts that a sync and a log touch.

The names, and in which order they are used, are those of `trl/experimental/async_grpo/async_grpo_trainer.py` in TRL
1.14.0, 1.15.0 and 1.16.0: what is common in `AsyncGRPOTrainer`, what only one has in its class. scripts/check-trl holds
the real sources to the same.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from proxy.simulator.adapters import lora_config, lora_tensors

TAKEN, DROPPED = "sample/staleness_mean", "sample/dropped_stale_total"


class Config(dict[str, Any]):
    """A peft LoraConfig."""

    inference_mode = False

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


class Model:
    """A PeftModel; each step gives its adapter the weights of another seed."""

    def __init__(self, name: str = "default") -> None:
        self.active_adapters = [name]
        self.peft_config = {name: Config(lora_config(rank=8))}
        self.tensors = {name: lora_tensors(rank=8, seed=0)}

    def step(self, seed: int) -> None:
        self.tensors["default"] = lora_tensors(rank=8, seed=seed)

    def named_parameters(self) -> list[tuple[str, Any]]:
        return []


class Worker:
    """An AsyncRolloutWorker: its process asks for `trl-policy-v{model_version}`."""

    def __init__(self) -> None:
        self.model_version = 0
        self.told: list[int] = []
        self.started_at: int | None = None
        """The version that it asked for first."""

    def start(self) -> None:
        self.started_at = self.model_version

    def update_model_version(self, model_version: int) -> None:
        self.told.append(model_version)
        self.model_version = model_version


class AsyncGRPOTrainer:
    """One process that trains an adapter and syncs it."""

    def __init__(self, *, max_staleness: int = 1, weight_sync_steps: int = 1, lora: bool = True) -> None:
        self.args = SimpleNamespace(max_staleness=max_staleness, weight_sync_steps=weight_sync_steps)
        self.state = SimpleNamespace(global_step=0, log_history=[])
        self.control = SimpleNamespace(should_log=False)
        self.model = Model()
        self.accelerator = SimpleNamespace(is_main_process=True, num_processes=1, unwrap_model=lambda model: model)
        self.callbacks: list[Any] = []
        self.rollout_worker: Any = Worker()
        self.model_version = 0
        self._lora_sync = lora
        self._lora_name = "trl-policy"
        self._adapter_name = "default"
        self._metrics: dict[str, dict[str, list[Any]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._on_step_end: Callable[[], None] = self._sync_weight  # bound when the trainer is made, as TRL's callback
        self.trl_synced = 0
        """Syncs that TRL made itself."""

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def train(self, steps: int, *, logging_steps: int = 1, dropped: Sequence[int] = (), taken: int = 4) -> None:
        """Train; before step N as many samples as `dropped` says there are dropped, and `taken` taken."""
        self._sync_weight()
        self.rollout_worker.start()
        for step in range(1, steps + 1):
            lists = self._metrics["train"]
            for _ in range(dropped[step - 1] if step <= len(dropped) else 0):
                lists[DROPPED].append(1.0)
            for _ in range(taken):
                lists[TAKEN].append(1.0)
            self.model.step(self.state.global_step + 1)
            self.state.global_step += 1
            if self.state.global_step % self.args.weight_sync_steps == 0:
                self._on_step_end()
            self.control.should_log = step % logging_steps == 0
            self._call("on_step_end")
            if self.control.should_log:
                self.log({"loss": 1.0})
        self.log({"train_runtime": 1.0})
        self._call("on_train_end")

    def log(self, logs: dict[str, Any], *, mode: str = "train") -> None:
        prefix = "" if mode == "train" else f"{mode}_"
        logs.update({prefix + name: _reduced(name, values) for name, values in self._metrics[mode].items()})
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._call("on_log", logs=logs)
        self._metrics[mode].clear()

    def _sync_weight(self) -> None:
        began = time.time()
        paused, waited, transferred = self._sync_weight_lora(began)
        lists = self._metrics["train"]
        lists["perf/weight_sync_s"].append(time.time() - began)
        for phase, took in (
            ("pause", paused - began),
            ("barrier", waited - paused),
            ("transfer", transferred - waited),
        ):
            lists[f"perf/weight_sync_{phase}_s"].append(took)

    def _sync_weight_lora(self, t0: float) -> tuple[float, float, float]:
        self.trl_synced += 1
        return t0, t0, t0

    def _call(self, event: str, **details: Any) -> None:
        for callback in self.callbacks:
            if handler := getattr(callback, event, None):
                handler(self.args, self.state, self.control, model=self.model, **details)


class Trl114(AsyncGRPOTrainer):
    """TRL 1.14.0."""

    model_accepts_loss_kwargs = False


class Trl115(AsyncGRPOTrainer):
    """TRL 1.15.0."""

    eos_token_ids = (2,)
    _peak_flops_per_device = None


class Trl116(Trl115):
    """TRL 1.16.0: as 1.15.0 in all that is here."""

    loss_is_scaled_for_ga = True


BY_VERSION = {"1.14.0": Trl114, "1.15.0": Trl115, "1.16.0": Trl116}


def _reduced(name: str, values: list[float]) -> float:
    words = name.split("/")[-1].split("_")
    if "total" in words:
        return sum(values)
    return max(values) if "max" in words else sum(values) / len(values)


def stand_in_libraries(patch: pytest.MonkeyPatch) -> None:
    """Put stand-ins for the two functions of peft and transformers that the integration takes into their place."""
    peft, transformers = ModuleType("peft"), ModuleType("transformers")
    peft.get_peft_model_state_dict = (  # type: ignore[attr-defined]
        lambda model, adapter_name, save_embedding_layers: dict(model.tensors[adapter_name])
    )
    transformers.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    for module in (peft, transformers):
        patch.setitem(sys.modules, module.__name__, module)
    patch.delitem(sys.modules, "trainer_client.integrations.trl.logs", raising=False)
