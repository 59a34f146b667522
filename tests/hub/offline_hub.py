"""An offline Hub: what huggingface_hub and hf_xet need of huggingface.co, on a free port of this machine.

    with OfflineHub() as hub:
        hub.api().create_bucket("tester/runs")
        hub.set_faults(landing_s=2.5)

Other processes find it through `hub.environment()`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any, Self

import httpx2
import msgspec
from huggingface_hub import HfApi

from tests.hub.hub_process import TOKEN
from tests.support.tiny_model import REPO

_CALL_S = 10
_STOP_S = 15


class OfflineHub:
    """A process that serves from entering to leaving the context.

    A Job whose command begins with a key of `programs` runs the words there in its place.
    """

    def __init__(self, *, programs: dict[str, list[str]] | None = None) -> None:
        self._programs = programs or {}

    def __repr__(self) -> str:
        return f"OfflineHub({getattr(self, 'url', 'not started')})"

    def __enter__(self) -> Self:
        self._home = tempfile.TemporaryDirectory(prefix="offline-hub-")
        command = [sys.executable, "-m", "tests.hub.hub_process", self._home.name, json.dumps(self._programs)]
        self._process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        with self._process.stdout as output:
            self.url = output.readline().decode().strip()
        assert self.url, f"the offline Hub did not start: exit code {self._process.wait(_STOP_S)}"
        # It is listening already, so the first call waits until it answers.
        self._control = httpx2.Client(base_url=self.url, timeout=_CALL_S, trust_env=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        finally:
            self._process.kill()
            self._process.communicate()
            self._home.cleanup()

    def api(self) -> HfApi:
        """Return a real client of this Hub with a good token."""
        return HfApi(endpoint=self.url, token=TOKEN)

    def environment(self) -> dict[str, str]:
        """Return the variables with which another process finds this Hub and writes nothing into the user's home."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HOME": f"{self._home.name}/clients",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def set_faults(self, **faults: Any) -> None:
        """Set fields of `Faults`; the others stay as they are."""
        answer = self._control.post("/offline/faults", content=msgspec.json.encode(faults))
        assert answer.status_code == 200, answer.text

    @property
    def calls(self) -> list[str]:
        """Return `METHOD /path` of every call, in order of arrival."""
        calls: list[str] = self._state()["calls"]
        return calls

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all xorbs as they were uploaded."""
        stored: int = self._state()["stored_bytes"]
        return stored

    def kill_job(self, job_id: str) -> None:
        """Let a Job's process die, as a machine that is lost."""
        self._control.post(f"/offline/jobs/{job_id}/kill").raise_for_status()

    def reset(self) -> None:
        """Forget everything: buckets, faults, calls. Jobs end."""
        self._control.post("/offline/reset").raise_for_status()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._control.get("/offline/state").raise_for_status().json()
        return state
