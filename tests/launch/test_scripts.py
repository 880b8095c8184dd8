"""The scripts of launch/: what they do where something is missing, fails or stops."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from megastable.base import errors
from megastable.config.recipe import load_recipe
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    ".ci/run",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("launch/*.s*")),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_bash(script: str) -> None:
    checked = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")


def test_hostfile_example_is_read_by_deepspeed() -> None:
    assert fetch_hostfile(str(ROOT / "launch/hostfile.example")) == {"node-01": 8, "node-02": 8}


# install.sh


def test_install_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    (tmp_path / "launch").mkdir()
    for file in ("pyproject.toml", "constraints.txt", "launch/install.sh"):
        shutil.copy(ROOT / file, tmp_path / file)
    words, environment = ["bash", tmp_path / "launch/install.sh", "dev"], {**os.environ, "PYTHON": str(old)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == errors.BAD_INPUT
    assert "needs Python 3.11 or newer" in done.stderr and "Python 3.9.2" in done.stderr


def test_quickstart_plants_what_its_recipe_trains_on() -> None:
    (corpus,) = load_recipe("launch/recipes/quickstart.yaml").data.corpora
    (line,) = re.findall(r"megastable prepare plant .*", (ROOT / "launch/quickstart.sh").read_text())
    assert line.split()[3:5] == ["data/stdlib", str(corpus.path)]
