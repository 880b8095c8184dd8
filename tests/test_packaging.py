"""pyproject.toml and constraints.txt: ranges and pins that agree."""

from __future__ import annotations

import tomllib
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
