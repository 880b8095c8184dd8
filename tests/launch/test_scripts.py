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
from megastable.config.model import ExpertsConfig
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


def test_quickstart_passes_its_overrides_on(tmp_path: Path) -> None:
    """Word by word, to what plants and to what trains: a mixture of experts is one of them."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch/quickstart.sh", tmp_path / "launch")
    (tmp_path / "launch/install.sh").write_text("")
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    for name in ("megastable", "python"):
        (programs / name).write_text(
            "#!/bin/sh\n[ $1 = -c ] && echo 0 && exit\n"
            f"{{ echo {name}; printf '%s\\n' \"$@\"; echo; }} >>{tmp_path / 'said'}\n"
            "[ $1 = launch/supervise.py ] && exit 75\nexit 0\n"
        )
        (programs / name).chmod(0o755)
    overrides = ["model.experts={count: 8, top_k: 2, ffn: 384}", "run.dir=runs/experts", "train.steps=150"]
    words = ["bash", tmp_path / "launch/quickstart.sh", *overrides]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 75, done.stderr
    called = [words.splitlines() for words in (tmp_path / "said").read_text().split("\n\n") if words]
    (plant,) = [words for words in called if words[:3] == ["megastable", "prepare", "plant"]]
    (train,) = [words for words in called if words[:2] == ["python", "launch/supervise.py"]]
    assert plant[plant.index("--") + 1 :] == overrides
    recipe, *given = train[2 : train.index("--")]
    config = load_recipe(str(ROOT / recipe), given)
    assert config.model.experts == ExpertsConfig(count=8, top_k=2, ffn=384)
    assert (config.train.steps, config.run.dir) == (150, Path("runs/experts"))


def test_quickstart_plants_what_its_recipe_trains_on() -> None:
    (corpus,) = load_recipe("launch/recipes/quickstart.yaml").data.corpora
    (line,) = re.findall(r"megastable prepare plant .*", (ROOT / "launch/quickstart.sh").read_text())
    assert line.split()[3:5] == ["data/stdlib", str(corpus.path)]
