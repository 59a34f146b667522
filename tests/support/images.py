"""The image of the Dockerfile, built and run by buildah without a Docker engine.

Images are kept in a folder of the test's. What the build installs comes from a folder of wheels that this machine's pip
fills, so a registry's settings need not be in the image. Containers are chroots: they share this machine's network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.tiny_model import REPO

BASE = REPO / ".containers" / "base.tar"
_BASE_NAME, _NAME = "localhost/lora-sync-base", "localhost/lora-sync-proxy"
_STEP_S = 300


def why_not() -> str | None:
    """Return why no image can be built here, or None if one can."""
    if shutil.which("buildah") is None:
        return "buildah is not installed; scripts/container-env installs it"
    if not BASE.exists():
        return "there is no base image; scripts/container-env makes one"
    return None


class Image:
    """Built on entering the context; nothing is left of it afterwards. `run` starts its entrypoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buildah = [
            *("buildah", "--root", str(folder / "images"), "--runroot", str(folder / "run"), "--storage-driver", "vfs")
        ]

    def __enter__(self) -> Self:
        try:
            self._make_base()
            self._build()
            self.config: dict[str, Any] = json.loads(self._do("inspect", "--type", "image", _NAME))["Docker"]["config"]
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

    def run(self, *arguments: str, entrypoint: list[str] | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start a container with these arguments for the entrypoint."""
        container = self._do("from", "--pull-never", _NAME).strip()
        variables = [part for name, value in environment.items() for part in ("--env", f"{name}={value}")]
        command = [*(self.config["Entrypoint"] if entrypoint is None else entrypoint), *arguments]
        return subprocess.Popen(
            [*self._buildah, "run", "--isolation", "chroot", *variables, container, "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_read_only(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a container whose root nobody can write to, as the image's user and without any right, with no /tmp.

        As `docker run --read-only --cap-drop ALL` does it; buildah has no such option for chroots.
        """
        container = self._do("from", "--pull-never", _NAME).strip()
        root = self._do("mount", container).strip()
        inside = {**dict(entry.split("=", 1) for entry in self.config["Env"]), **environment}
        user = self.config["User"]
        script = (
            'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && mount -t proc proc "$0/proc" && '
            'mount --bind /dev "$0/dev" && exec chroot "$0" setpriv --no-new-privs --bounding-set=-all --inh-caps=-all '
            f'--reuid={user} --regid={user} --clear-groups "$@"'
        )
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, root, *self.config["Entrypoint"], *arguments],
            env=inside,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read(self, path: str) -> str:
        """Return a file of the image."""
        container = self._do("from", "--pull-never", _NAME).strip()
        return Path(self._do("mount", container).strip(), path.lstrip("/")).read_text()

    def _make_base(self) -> None:
        container = self._do("from", "scratch").strip()
        self._do("add", "--quiet", container, str(BASE), "/")
        self._do("commit", "--quiet", "--rm", container, _BASE_NAME)

    def _build(self) -> None:
        wheels = self._folder / "wheels"
        pip = [sys.executable, "-m", "pip", "--quiet", "download", "--only-binary=:all:", f"--dest={wheels}"]
        pip += ["--python-version=3.11"]  # that of the base image
        needed = json.loads(_run([sys.executable, "-c", _REQUIREMENTS, str(REPO / "pyproject.toml")]))
        _run([*pip, *needed, "cyclonedx-bom>=7"])
        settings = self._folder / "pip.conf"
        settings.write_text("[global]\nno-index = true\nfind-links = /wheels\n")
        mounts = ["--volume", f"{wheels}:/wheels:ro", "--volume", f"{settings}:/etc/pip.conf:ro"]
        options = ["--isolation", "chroot", "--format", "docker", "--layers=false", "--pull-never"]
        self._do("bud", *options, *mounts, "--build-arg", f"BASE={_BASE_NAME}", "--tag", _NAME, str(REPO))

    def _do(self, *arguments: str) -> str:
        return _run([*self._buildah, *arguments])

    def _clean(self) -> None:
        subprocess.run([*self._buildah, "rm", "--all"], capture_output=True, timeout=_STEP_S)
        subprocess.run([*self._buildah, "rmi", "--all", "--force"], capture_output=True, timeout=_STEP_S)
        shutil.rmtree(self._folder, ignore_errors=True)


_REQUIREMENTS = """
import json, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))
print(json.dumps(project["project"]["dependencies"] + project["build-system"]["requires"]))
"""


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_S)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout
