"""The scripts of launch/: what they do where something is missing, fails or stops."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from megastable.base import errors
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    ".ci/run",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("launch/*.s*")),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_is_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")


def test_the_scripts_are_all_there() -> None:
    assert {"launch/install.sh", "launch/quickstart.sh", "launch/slurm.sbatch", "launch/test.sh"} <= set(
        SCRIPTS
    )


def test_deepspeed_reads_the_hostfile_example() -> None:
    assert fetch_hostfile(str(ROOT / "launch/hostfile.example")) == {"node-01": 8, "node-02": 8}


def test_deepspeed_reads_the_environment_example() -> None:
    for line in (ROOT / "launch/deepspeed_env.example").read_text().splitlines():
        key, value = line.split("=", maxsplit=1)  # as its launcher does, to every line
        assert key.isidentifier()
        assert value


# install.sh


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What install.sh needs of the project, elsewhere, with no package index in reach."""
    (tmp_path / "launch").mkdir()
    for file in ("pyproject.toml", "constraints.txt", "launch/install.sh"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def install(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    return subprocess.run(
        ["bash", clone / "launch/install.sh", "dev"],
        env={**os.environ, **offline, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_an_old_python_is_refused(clone: Path) -> None:
    old = clone / "python3.9"
    old.write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    done = install(clone, PYTHON=str(old))
    assert done.returncode == errors.BAD_INPUT
    assert "needs Python 3.11 or newer" in done.stderr
    assert "Python 3.9.2" in done.stderr


def test_another_system_is_refused_before_anything_is_made(clone: Path) -> None:
    """flock, setsid and mv -T are missing there, and DeepSpeed would not build."""
    (clone / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (clone / "uname").chmod(0o755)
    done = install(clone, PATH=f"{clone}:{os.environ['PATH']}")
    assert done.returncode == errors.BAD_INPUT and "needs Linux, and this is Darwin" in done.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.slow
def test_an_interrupted_install_is_begun_anew_and_a_failed_one_shows_why(clone: Path) -> None:
    environment = clone / ".venv"
    environment.mkdir()
    (environment / ".installing").touch()
    (environment / "half-written").touch()
    done = install(clone)
    assert "making it anew" in done.stdout
    assert not (environment / "half-written").exists()

    assert done.returncode == errors.BAD_INPUT
    assert "setuptools" in done.stderr  # pip's own words
    assert ".venv/install.log" in done.stderr
    assert not (environment / ".installed").exists()

    again = install(clone)  # what pip undid is built upon
    assert "making it anew" not in again.stdout
    assert "virtual environment" not in again.stdout
