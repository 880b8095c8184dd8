"""A record replaces an older one as a whole, and nothing of others is lost."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.report.publish import record_folder
from megastable.report.publish.record_folder import building, own_files, put_in_place, sums, write_sums


def write(site: Path, **files: str) -> None:
    """A record with these files."""
    site.mkdir()
    (site / "record.json").write_text('{"format": "megastable record"}')
    for name, text in files.items():
        path = site / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    write_sums(site)


def publish(output: Path, **files: str) -> list[str]:
    with building(output) as part:
        write(part / "site", **files)
        return put_in_place(part / "site", output)


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


OWN = {"record.json", "SHA256SUMS"}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "public"


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot exchange two folders."""
    if request.param == "two renames":
        monkeypatch.setattr(record_folder, "_exchanged", lambda one, other: False)


def test_a_new_one_and_the_next(output: Path, way: None) -> None:
    publish(output, a="1", old__b="2")
    assert listing(output) == OWN | {"a", "old/b"}
    publish(output, a="3", new__c="4")
    assert listing(output) == OWN | {"a", "new/c"} and (output / "a").read_text() == "3"
    assert list(output.parent.iterdir()) == [output]


def test_the_command_checks_the_hashes(output: Path) -> None:
    publish(output, a="1", **{"with blank__b": "2"})
    check = record_folder.CHECK.split()
    assert subprocess.run(check, cwd=output).returncode == 0
    (output / "with blank" / "b").write_text("3")
    assert subprocess.run(check, cwd=output, capture_output=True).returncode == 1
    assert set(sums(output)) == {"a", "record.json", "with blank/b"}


def test_files_of_others_stay(output: Path, way: None) -> None:
    publish(output, a="1")
    (output / "CNAME").write_text("example.org")
    (output / ".git").mkdir()
    (output / "notes" / "empty").mkdir(parents=True)
    (output / "notes" / "mine").write_text("m")
    (output / "link").symlink_to("nowhere")
    assert publish(output, a="2", notes__ours="3") == [".git", "CNAME", "link", "notes/empty", "notes/mine"]
    assert (output / "CNAME").read_text() == "example.org" and (output / "notes" / "mine").read_text() == "m"
    assert os.readlink(output / "link") == "nowhere" and (output / ".git").is_dir()
    assert (output / "notes" / "empty").is_dir() and (output / "a").read_text() == "2"
    assert list(output.parent.iterdir()) == [output]


def test_a_file_of_others_in_the_way(output: Path) -> None:
    publish(output, a="1")
    (output / "b").write_text("mine")
    with pytest.raises(DataError, match=r"b is not the record's, but has the name of a file of it"):
        publish(output, a="2", b="2")
    assert (output / "b").read_text() == "mine" and (output / "a").read_text() == "1"


def test_what_is_not_a_record_is_refused(output: Path) -> None:
    output.write_text("a file")
    with pytest.raises(DataError, match="is no folder"):
        publish(output)
    output.unlink()
    output.mkdir()
    (output / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match="no record that this command wrote"):
        publish(output)
    assert listing(output) == {"thesis.tex"} and list(output.parent.iterdir()) == [output]
    (output / "thesis.tex").unlink()
    publish(output, a="1")  # an empty folder is fine


def test_a_changed_file_is_not_overwritten(output: Path) -> None:
    publish(output, a="1", b="1")
    (output / "a").write_text("a remark of a person")
    with pytest.raises(DataError, match="a was changed after it was written"):
        publish(output, a="2")
    (output / "a").unlink()  # to remove one is no change that would be lost
    publish(output, a="2")
    assert listing(output) == OWN | {"a"}


def test_sums_that_lead_out_of_the_folder_are_not_followed(output: Path) -> None:
    publish(output, a="1")
    with (output / "SHA256SUMS").open("a") as file:
        file.write(f"{'0' * 64}  ../precious\n{'0' * 64}  /etc/passwd\n")
    assert set(own_files(output)) == {"a", "record.json"}


def test_a_build_that_fails_changes_nothing(output: Path) -> None:
    publish(output, a="1")

    def fail() -> None:
        with building(output) as part:
            write(part / "site", a="2")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (output / "a").read_text() == "1" and list(output.parent.iterdir()) == [output]


def test_two_at_once(output: Path) -> None:
    with building(output) as part:
        (part / "site").write_text("x")
        with pytest.raises(DataError, match="another process writes this record now"), building(output):
            pass
        assert (part / "site").exists()
    assert not part.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from megastable.report.publish import record_folder
from tests.report.publish.test_record_folder import write
output, moment = Path(sys.argv[1]), sys.argv[2]
record_folder._exchanged = lambda one, other: False
rename, done = Path.rename, []
def renamed(self, target):
    if len(done) == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(rename(self, target))
Path.rename = renamed
with record_folder.building(output) as part:
    write(part / "site", a="2")
    record_folder.put_in_place(part / "site", output)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [0, 1])
def test_a_process_killed_while_it_replaces(output: Path, moment: int) -> None:
    """moment: before the first rename, or between two, where folders cannot be exchanged."""
    publish(output, a="1")
    (output / "CNAME").write_text("example.org")
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, str(output), str(moment)], cwd=root)
    assert done.returncode == -9 and output.exists() == (moment == 0)
    publish(output, a="3")
    assert (output / "a").read_text() == "3" and (output / "CNAME").read_text() == "example.org"
    assert list(output.parent.iterdir()) == [output]


def test_a_lock_on_a_folder_that_was_removed_is_none(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ends, and removes its folder, between the moments at which this one opens and locks it."""
    part, flock = output.with_name(".public.partial"), fcntl.flock

    def late(lock: int, how: int) -> None:
        monkeypatch.undo()
        part.rmdir()
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(DataError, match="wait for it"), building(output):
        pass
    publish(output, a="1")


def test_the_folder_that_it_is_built_in_is_never_that_of_somebody_else(output: Path) -> None:
    """Neither behind a link, nor under the same name."""
    elsewhere, part = output.parent / "elsewhere", output.with_name(".public.partial")
    elsewhere.mkdir()
    (elsewhere / "site").write_text("mine")
    part.symlink_to(elsewhere)
    with pytest.raises(DataError, match=r"\.public\.partial cannot be made"):
        publish(output, a="1")
    assert listing(elsewhere) == {"site"}
    part.unlink()
    elsewhere.rename(part)
    (part / "thesis.tex").write_text("mine")
    with pytest.raises(DataError, match=r"thesis\.tex is in the way"):
        publish(output, a="1")
    assert (part / "thesis.tex").read_text() == "mine"
