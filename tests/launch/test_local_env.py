"""The code and its environment on the local disk of a host: once, whole, and under its own paths."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch/local_env.sh"


def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *map(str, words)], capture_output=True, text=True)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Of a small repository whose package and whose command are installed as pip does it, by path."""
    here = tmp_path / "shared/repository"
    binaries, packages = here / ".venv/bin", here / ".venv/lib/site-packages"
    for folder in (here / "launch", here / "code", binaries, packages):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, here / "launch")
    (here / "code/module.py").write_text("print(__file__)\n")
    (packages / "__editable__code.pth").write_text(f"{here}/code\n")
    (packages / "other.py").write_text(f"# {here}\n")
    (binaries / "python").symlink_to(sys.executable)
    (binaries / "command").write_text(
        f"#!{here}/.venv/bin/python\nimport sys\nsys.path.append('{here}/code')\nimport module\n"
    )
    (binaries / "command").chmod(0o755)
    for words in (["init", "-q"], ["add", "code", "launch"]):
        subprocess.run(["git", *words], cwd=here, check=True)
    packed = call(here / "launch/local_env.sh", "pack", tmp_path / "shared/env.tar")
    assert packed.returncode == 0, packed.stderr
    return tmp_path / "shared/env.tar"


def test_several_at_once_unpack_it_once_under_its_own_paths(archive: Path, tmp_path: Path) -> None:
    words = ["bash", str(SCRIPT), "unpack", str(archive), str(tmp_path / "local")]
    several = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    (folder,) = {Path(process.communicate()[0].strip()) for process in several}
    assert [path for path in (tmp_path / "local").iterdir() if path.name != ".lock"] == [folder]
    shutil.rmtree(archive.parent / "repository")
    said = subprocess.run([folder / ".venv/bin/command"], capture_output=True, text=True)
    assert said.stdout == f"{folder}/code/module.py\n", said.stderr
    assert (folder / ".venv/lib/site-packages/__editable__code.pth").read_text() == f"{folder}/code\n"
    assert (
        str(archive.parent) in (folder / ".venv/lib/site-packages/other.py").read_text()
    )  # not read, not changed
    archive.unlink()  # kept: nobody reads it again
    assert call(*words[1:]).stdout == f"{folder}\n"


def test_a_damaged_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    refused = call(SCRIPT, "unpack", archive, tmp_path / "local")
    assert refused.returncode == 2 and "is not what" in refused.stderr
    assert not [path for path in (tmp_path / "local").iterdir() if len(path.name) == 64]


def test_half_an_environment_is_none(archive: Path, tmp_path: Path) -> None:
    """A disk without room for the second file: the next call begins again."""
    several = "ulimit -f 1; trap '' XFSZ; bash \"$@\""
    (archive.parent / "repository/code/large.bin").write_bytes(b"x" * 4096)
    subprocess.run(["git", "add", "code"], cwd=archive.parent / "repository", check=True)
    assert call(archive.parent / "repository/launch/local_env.sh", "pack", archive).returncode == 0
    words = [SCRIPT, "unpack", archive, tmp_path / "local"]
    failed = call("-c", several, "bash", *words)
    assert failed.returncode == 2 and "could not be unpacked" in failed.stderr, failed.stderr
    assert not [path for path in (tmp_path / "local").iterdir() if len(path.name) == 64]
    assert (Path(call(*words).stdout.strip()) / "code/large.bin").stat().st_size == 4096
