"""pyproject.toml and constraints.txt: ranges and pins that agree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megastable
from megastable.cluster.launcher import find_free_port
from tests.data.texts import documents

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megastable", "guard/megastable_guard", "tools/megastable_tools")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RANGES = [Requirement(r) for r in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])]


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version
    return found


def test_every_pin_is_one_public_version() -> None:
    for name, version in pins().items():
        # A local version (+cpu) or an option would tie the install to one index.
        assert version, name
        assert not set(version) & set("+ ;@-/"), f"{name}=={version}"


@pytest.mark.parametrize("wanted", RANGES, ids=lambda r: str(r.name))
def test_the_pin_is_in_the_range(wanted: Requirement) -> None:
    assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)])


def test_whatever_gets_installed_is_pinned() -> None:
    pinned, seen, todo = pins(), set(), list(RANGES)
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or any(s.operator == "==" for s in requirement.specifier):
            continue  # whoever names one version has pinned it already, as torch does with CUDA's packages
        seen.add(name)
        assert name in pinned, f"{requirement} is not in constraints.txt"
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed here
        environments = [{"extra": extra} for extra in (*requirement.extras, "")]
        todo += [
            r
            for r in map(Requirement, needs)
            if r.marker is None or any(r.marker.evaluate(environment) for environment in environments)
        ]
    assert {"torch", "deepspeed", "pytest", "numpy"} <= seen


def test_the_version_is_read_from_the_package() -> None:
    assert metadata.version("megastable") == megastable.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves its files behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, "."], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Templates and what is vendored too, which the page of a sheet is made of; and the recipes."""
    packages = [wheel.parent / name for name in PACKAGES]
    files = {
        str(path.relative_to(package.parent))
        for package in packages
        for path in package.rglob("*")
        if path.is_file()
    }
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    assert any(name.endswith("vendor/tabulator.min.js") for name in files)
    for folder in ("ds_configs", "launch/recipes", "launch/clusters"):
        assert (
            ROOT / folder
        ).resolve() == ROOT / "megastable/shipped" / folder  # one place, and the path of a checkout


def test_the_wheel_of_the_guard_is_small_and_needs_no_torch(tmp_path: Path) -> None:
    """Alone, from a folder without a checkout: the judgement and what writes a run directory."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / "guard" / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "guard/megastable_guard", tmp_path / "megastable_guard", ignore=ignored)
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 200_000
    names = zipfile.ZipFile(wheel).namelist()
    assert "megastable_guard/run_files.py" in names and "megastable_guard/adapters/lightning.py" in names
    code = (
        "import sys; import megastable_guard as guard; assert 'numpy' not in sys.modules; "
        "from megastable_guard.step_judge import StepJudge; from megastable_guard.guard_record import GuardRecord; "
        "from megastable_guard.run_files import RunFiles; "
        "print(guard.__file__, sorted({'torch', 'pyarrow', 'megastable'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(wheel), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(wheel) in done.stdout and done.stdout.endswith(" []\n")


@pytest.mark.slow
def test_a_wheel_alone_trains_under_a_supervisor(wheel: Path, tmp_path: Path) -> None:
    """The quickstart's steps in a folder from which no checkout can be imported."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # The libraries are those of this environment. Their own .pth files, which lead to a checkout, are not read.
    (site / "libraries.pth").write_text(str(Path(torch.__file__).parents[1]))
    zipfile.ZipFile(wheel).extractall(site)
    python, here = tmp_path / "venv/bin/python", tmp_path / "here"
    here.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

    def call(*words: object, told: str = "") -> str:
        done = subprocess.run(
            [str(word) for word in (python, *words)],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert told in done.stdout + done.stderr
        return done.stdout

    def command(*words: object, told: str = "") -> str:
        return call("-m", "megastable.cli", *words, told=told)

    call("-c", "import megastable; print(megastable.__file__)", told=str(site))
    recipe, few = (
        "launch/recipes/quickstart.yaml",
        ["data.corpora=[{path: data/mine}]", "train.eval_samples=0"],
    )
    (here / "texts").mkdir()
    for number, text in enumerate(documents(60)):
        (here / "texts" / f"{number}.txt").write_text(text)
    size = ["--vocab-size", "400"]
    command("prepare", "tokenizer", "--input", "texts", "--output", "tokenizer.model", *size)
    command(
        "prepare", "shards", "--input", "texts", "--output", "data/mine", "--tokenizer", "tokenizer.model"
    )
    call("-m", "megastable.config", recipe, *few, "--world", 2, told="valid on 2 ranks")
    command("plan", "launch/recipes/7b.yaml", "--vocab", 32000, "--gpus", 64)
    small = [*few, "train.global_batch=8", "model.layers=1", "train.steps=3"]
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", 2, "--master_port", find_free_port()]
    call(*launcher, "--module", "megastable.train", recipe, *small, "run.dir=runs/alone")
    assert json.loads((here / "runs/alone/summary.json").read_text())["steps"] == 3
    supervised = ["supervise", recipe, *small, "run.dir=runs/supervised", "--", "--num_gpus", "2"]
    script = '"$@" | head -1; exit ${PIPESTATUS[0]}'  # a reader that ends at once ends no run
    words = ["bash", "-c", script, "bash", python, "-m", "megastable.cli", *supervised]
    assert subprocess.run(words, cwd=here, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    command("status", "runs/supervised", told="complete")
