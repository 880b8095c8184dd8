"""A record replaces an older one, and nothing of others is lost."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megastable.base.errors import DataError
from megastable.report.publish import MARK, put_in_place

OWN = {"index.html", "SHA256SUMS"}


def publish(output: Path, **files: str) -> dict[str, int]:
    """A record with these files."""
    with TemporaryDirectory() as name:
        for file, text in {"index.html": f"<!doctype html>\n{MARK}", **files}.items():
            path = Path(name) / file.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return put_in_place(Path(name), output)


def listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "public"


def test_put_in_place_writes_a_new_record_and_the_next(output: Path) -> None:
    publish(output, a="1", **{"with blank__b": "2"})
    assert listing(output) == OWN | {"a", "with blank/b"}
    sizes = publish(output, a="3", new__c="4")
    assert listing(output) == OWN | {"a", "new/c"} and (output / "a").read_text() == "3"
    assert sizes == {name: (output / name).stat().st_size for name in OWN | {"a", "new/c"}}
    assert list(output.parent.iterdir()) == [output] and not (output / "with blank").exists()
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=output).returncode == 0
    (output / "new" / "c").write_text("5")
    assert subprocess.run(check, cwd=output, capture_output=True).returncode == 1


def test_put_in_place_leaves_files_of_others(output: Path) -> None:
    publish(output, a="1", notes__old="1")
    (output / "CNAME").write_text("example.org")
    (output / ".git").mkdir()
    (output / "notes" / "mine").write_text("m")
    (output / "link").symlink_to("nowhere")
    publish(output, a="2", notes__ours="3")
    assert listing(output) == OWN | {"CNAME", "link", "notes/mine", "a", "notes/ours"}
    assert os.readlink(output / "link") == "nowhere" and (output / ".git").is_dir()
    (output / "b").write_text("mine")
    with pytest.raises(DataError, match=r"b is not the record's"):
        publish(output, a="3", b="2")
    assert (output / "b").read_text() == "mine" and (output / "a").read_text() == "2"


@pytest.mark.parametrize("what", ["a file", "a folder", "sums of another program"])
def test_put_in_place_refuses_what_is_not_a_record(what: str, output: Path) -> None:
    if what == "a file":
        output.write_text("x")
    else:
        output.mkdir()
        (output / "index.html").write_text("x")
        if what != "a folder":
            command = "sha256sum index.html > SHA256SUMS"
            subprocess.run(command, shell=True, cwd=output, check=True)
    before = listing(output)
    with pytest.raises(DataError, match=r"is no folder|no record that this command wrote"):
        publish(output)
    assert listing(output) == before and list(output.parent.iterdir()) == [output]


def test_put_in_place_overwrites_no_changed_file(output: Path) -> None:
    publish(output, a="1", b="1")
    (output / "a").write_text("a remark of a person")
    with pytest.raises(DataError, match="a is not the record's, or was changed after it was written"):
        publish(output, a="2")
    (output / "a").unlink()  # to remove one is no change that would be lost
    publish(output, a="2")
    assert listing(output) == OWN | {"a"}


def test_put_in_place_touches_nothing_outside_of_the_folder(output: Path) -> None:
    publish(output, a="1", below__b="1")
    (output.parent / "precious").write_text("mine")
    with (output / "SHA256SUMS").open("a") as file:
        file.writelines(
            f"{'0' * 64}  {name}\n" for name in ("../precious", "below/../../precious", "/etc/passwd")
        )
    publish(output, a="2")
    assert (output.parent / "precious").read_text() == "mine"
    (elsewhere := output.parent / "elsewhere").mkdir()
    (output / "below").symlink_to(elsewhere)
    with pytest.raises(DataError, match="below/b is not the record's"):
        publish(output, a="2", below__b="2")
    assert listing(elsewhere) == set()


def test_put_in_place_finishes_a_call_that_was_killed(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it was: at every rename, and at every file that is removed."""

    class Killed(BaseException):
        pass

    for moment in itertools.count():
        publish(output, a="1", old__b="1")
        left = moment
        replace, unlink = os.replace, Path.unlink

        def counted(do):  # type: ignore[no-untyped-def]
            def done(*arguments, **named):  # type: ignore[no-untyped-def]
                nonlocal left
                if output in (path := Path(arguments[-1])).parents and path.name in {*OWN, "a", "b", "c"}:
                    left -= 1
                    if left < 0:
                        raise Killed
                return do(*arguments, **named)

            return done

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", counted(replace))
            patched.setattr(Path, "unlink", counted(unlink))
            try:
                publish(output, a="2", new__c="2")
            except Killed:
                pass
            else:
                break
        publish(output, a="3")
        assert listing(output) == OWN | {"a"} and (output / "a").read_text() == "3"
    assert moment == 6  # sums, three files, one that is removed, and sums again
