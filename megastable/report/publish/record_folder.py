"""Puts a finished record in the place of an older one, whole or not at all; what others put there stays.

A record is built in `.NAME.partial` beside its folder, which is locked meanwhile. SHA256SUMS lists its files: what is
not in it belongs to somebody else.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megastable.base.durable import sync_directory
from megastable.base.errors import DataError
from megastable.base.text import visible
from megastable.run.directory import read_object

SUMS, RECORD = "SHA256SUMS", "record.json"
CHECK = f"sha256sum --check --quiet {SUMS}"
OWN = {"site", "old"}  # names in the folder that it is built in
FORMAT = "megastable record"  # in record.json: whose folder it is
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


@contextmanager
def building(output: Path) -> Iterator[Path]:
    """An empty folder beside `output` to build in, removed at the end. Raises DataError if `output` is not a record, or
    if another process builds it."""
    part = output.with_name(f".{output.name}.partial")
    with _locked(part, output):
        if (part / "old").exists() and not output.exists():
            (part / "old").rename(output)  # a run of this was killed between two renames
        try:
            own_files(output)  # raises if it is somebody else's
            if foreign := sorted({path.name for path in part.iterdir()} - OWN):
                raise DataError(
                    f"{visible(part / foreign[0])} is in the way, and not of this command: move it away"
                )
            _clear(part)
            yield part
        finally:
            with suppress(OSError):
                _clear(part)
                part.rmdir()


@contextmanager
def _locked(part: Path, output: Path) -> Iterator[None]:
    try:
        part.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise DataError(f"{visible(part)} cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(lock), part.stat())  # not one that was removed a moment ago
        except OSError:
            mine = False
        if not mine:
            raise DataError(f"{visible(output)}: another process writes this record now: wait for it")
        yield
    finally:
        os.close(lock)


def own_files(output: Path) -> dict[str, str]:
    """The files of the record in a folder, with their hashes; none if there is nothing yet.

    Raises DataError if the folder holds something else, or if one of the files was changed.
    """
    if not os.path.lexists(output):
        return {}
    if not output.is_dir():
        raise DataError(f"{visible(output)} is no folder: choose another --output")
    if not any(output.iterdir()):
        return {}
    listed = sums(output)
    if read_object(output / RECORD).get("format") != FORMAT or RECORD not in listed:
        raise DataError(
            f"{visible(output)} has files, but no record that this command wrote: choose another --output, or empty it"
        )
    for name, digest in listed.items():
        path = output / name
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or hash_of(path) != digest):
            raise DataError(
                f"{visible(path)} was changed after it was written: move it away, or the whole folder, to write again"
            )
    return listed


def sums(folder: Path) -> dict[str, str]:
    """Hashes by name, as SHA256SUMS has them; only names inside of the folder."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    found = {m[2]: m[1] for line in lines if (m := _LINE.fullmatch(line))}
    return {name: digest for name, digest in found.items() if not {"..", ""} & set(name.split("/"))}


def write_sums(folder: Path) -> dict[str, int]:
    """Write SHA256SUMS of all files of a folder, and make them durable. Returns their sizes in bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    text = "".join(f"{hash_of(path)}  {name}\n" for path, name in zip(paths, names))
    (folder / SUMS).write_text(text, encoding="utf-8")
    for path in [*paths, folder / SUMS]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for below in [path for path in folder.rglob("*") if path.is_dir()] + [folder]:
        sync_directory(below)
    return {name: path.stat().st_size for path, name in zip([*paths, folder / SUMS], [*names, SUMS])}


def hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def put_in_place(site: Path, output: Path) -> list[str]:
    """Make `site` the folder `output`, in one step. Returns the names of files of others, which are in both by then.

    Raises DataError if one of them has a name that the record needs, and then nothing is changed.
    """
    old = {*own_files(output), SUMS}
    kept = [] if not output.exists() else sorted(_foreign(output, old))
    for name in kept:
        _keep(output / name, site / name)
    if not output.exists():
        site.rename(output)
    elif not any(output.iterdir()):
        output.rmdir()
        site.rename(output)
    elif not _exchanged(site, output):
        output.rename(site.with_name("old"))
        site.rename(output)
    sync_directory(output.parent)
    return kept


def _foreign(output: Path, own: set[str]) -> Iterator[str]:
    """Files, links and empty folders that are not the record's."""
    for path in output.rglob("*"):
        name = path.relative_to(output).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                yield name
        elif name not in own:
            yield name


def _keep(path: Path, target: Path) -> None:
    """The same file under another folder: a second name, so that a change of it at this moment is not lost either."""
    taken = os.path.lexists(target) or any(above.is_file() for above in target.parents)
    if path.is_dir() and not path.is_symlink():
        if taken and not target.is_dir():
            raise DataError(f"{visible(path)} is in the way of a file of the record: move it away")
        target.mkdir(parents=True, exist_ok=True)
        return
    if taken:
        raise DataError(
            f"{visible(path)} is not the record's, but has the name of a file of it: move it away"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError:  # a file system without second names
        shutil.copy2(path, target, follow_symlinks=False)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, if this system can."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return (
        exchange is not None and exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
    )


def _clear(folder: Path) -> None:
    for path in [folder / name for name in sorted(OWN) if os.path.lexists(folder / name)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
