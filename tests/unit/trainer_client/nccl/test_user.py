"""What counts as set by the user: the environment, and NCCL's own configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_client.nccl.user import ENVIRONMENT, UserSetting, user_settings


@pytest.fixture
def system_file(tmp_path: Path) -> Path:
    file = tmp_path / "nccl.conf"
    file.write_text("# for everybody\nNCCL_DEBUG=WARN\nNCCL_P2P_DISABLE=1\n\nno assignment\n")
    return file


def test_only_nccl_variables_count(tmp_path: Path) -> None:
    environ = {"NCCL_ALGO": "ring", "PATH": "/bin", "MY_NCCL_ALGO": "tree"}
    assert user_settings(environ, system_file=tmp_path / "none") == {
        "NCCL_ALGO": UserSetting("NCCL_ALGO", "ring", ENVIRONMENT)
    }


def test_the_environment_wins_over_the_user_file_and_that_over_the_system_file(
    tmp_path: Path, system_file: Path
) -> None:
    own = tmp_path / ".nccl.conf"
    own.write_text("NCCL_DEBUG=INFO\nNCCL_ALGO=tree\n")
    environ = {"HOME": str(tmp_path), "NCCL_ALGO": "ring"}
    found = user_settings(environ, system_file=system_file)
    assert {name: (user.value, user.where) for name, user in found.items()} == {
        "NCCL_ALGO": ("ring", ENVIRONMENT),
        "NCCL_DEBUG": ("INFO", str(own)),
        "NCCL_P2P_DISABLE": ("1", str(system_file)),
    }


def test_a_named_file_replaces_the_one_at_home(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_ALGO=tree\n")
    named = tmp_path / "named.conf"
    named.write_text("NCCL_PROTO=Simple\n")
    environ = {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(named)}
    assert set(user_settings(environ, system_file=tmp_path / "none")) == {"NCCL_PROTO", "NCCL_CONF_FILE"}


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_bytes(b"NCCL_ALGO=\xff\xfe\n")
    assert user_settings({"HOME": str(tmp_path)}, system_file=tmp_path) == {}
