"""The documents say what is true: links lead somewhere, runnable commands run, recipes and options exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megastable.commands.root import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    named = re.findall(
        r"(?:launch|tools|megastable|ds_configs|tests)/[\w./-]+\.(?:py|sh|yaml|sbatch|json)", text
    )
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash runnable\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_runnable_commands_run(page: Path, tmp_path: Path) -> None:
    for name in ("README.md", "docs", "megastable", "guard", "tools", "launch", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for block in blocks(page):
        done = subprocess.run(
            ["bash", "-euc", block],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_exit_codes_are_documented() -> None:
    from megastable.base import errors

    text = (ROOT / "docs/exit-codes.md").read_text(encoding="utf-8")
    codes = {
        (value, name) for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)
    }
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|.*\| ([^|]+) \|$", text, re.M)
    assert codes == {(int(code), name) for code, name, _ in rows}
    named = {word for *_, commands in rows for word in re.findall(r"`([\w-]+)`", commands)}
    assert named and named <= set(COMMANDS)


def test_config_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"python -m megastable\.config [^\n]+", text)
    done = subprocess.run(
        ["bash", "-c", command.replace("python", sys.executable, 1) + " --no-data"], cwd=ROOT, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0 and '"train_batch_size"' in done.stdout, done.stderr


@pytest.mark.parametrize("page", ["tour.md", "extending.md"])
def test_files_below_the_package_exist(page: str) -> None:
    """These pages name files without the package's folder."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert len(named) > 10
    folders = [ROOT / folder for folder in (".", "megastable", "guard", "tools", "tools/megastable_tools")]
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


def find_anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_anchors_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    missing = [
        f"{name}#{anchor}"
        for name, anchor in links
        if anchor not in find_anchors(page.parent / name if name else page)
    ]
    assert not missing
