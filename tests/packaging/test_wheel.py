"""What is shipped: the wheel, installed in a clean place, has everything it needs and nothing that it must not have."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(REPO)], check=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, str(wheel)], check=True, timeout=280, capture_output=True)
    return folder / "bin"


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"proxy", "trainer_client", "lora_sync_proxy-0.1.0.dist-info"}
    assert {"proxy/py.typed", "trainer_client/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    page = {
        path.relative_to(REPO).as_posix() for path in (REPO / "proxy/dashboard/static").rglob("*") if path.is_file()
    }
    assert "proxy/dashboard/static/index.html" in page
    assert page <= set(names)
    assert any(name.endswith("licenses/proxy/dashboard/static/uplot/LICENSE") for name in names)


def test_traces_need_the_extra_and_say_so(installed: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "UPSTREAM_URLS": "http://127.0.0.1:9", "PROXY_OTEL": "1", "PROXY_PORT": "0"}
    command = [installed / "lora-sync-proxy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (64, 1), done.stderr
    assert "pip install 'lora-sync-proxy[otel]'" in done.stderr


def test_its_commands_run(installed: Path) -> None:
    for command, words in {
        "lora-sync-proxy": ["serve", "sim", "demo", "UPSTREAM_URLS"],
        "lora-sync": ["publish", "policies", "check", "gc", "vllm-args", "nccl", "status", "top"],
    }.items():
        done = subprocess.run([installed / command, "--help"], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        assert all(word in done.stdout for word in words), done.stdout


def test_it_brings_no_torch(installed: Path) -> None:
    listed = subprocess.run([installed / "python", "-m", "pip", "list"], capture_output=True, text=True, timeout=30)
    heavy = {"torch", "vllm", "trl", "peft", "transformers"}
    assert not heavy & {line.split()[0].lower() for line in listed.stdout.splitlines() if line}


def test_it_imports_where_torch_cannot_be_imported(installed: Path) -> None:
    code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'peft', 'trl', 'transformers', 'vllm']));"
    code += "import proxy.app, proxy.demo.run, proxy.simulator.server, trainer_client"
    done = subprocess.run([installed / "python", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
