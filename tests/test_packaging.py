"""pyproject.toml and constraints.txt: ranges and pins that agree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megastable

ROOT = Path(__file__).resolve().parent.parent
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


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """Templates and what is vendored too, which the page of a sheet is made of."""
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "megastable", tmp_path / "megastable", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    files = {
        str(path.relative_to(tmp_path)) for path in (tmp_path / "megastable").rglob("*") if path.is_file()
    }
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    assert any(name.endswith("vendor/tabulator.min.js") for name in files)
