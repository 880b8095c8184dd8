"""Read the members of a tar archive as a stream: nothing is unpacked, and no link is followed.

A WebDataset is a tar in which consecutive members `000.jpg`, `000.txt`, `000.json` form one sample; see
https://github.com/webdataset/webdataset. An archive counts as one if its first samples look like that.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from pathlib import PurePosixPath
from typing import NamedTuple, NoReturn

from megastable.base.errors import DataError
from megastable_tools.prepare.forward import ForwardFile

PIECE = 1 << 20  # bytes of a member read at a time
LOOKED_AT = 64  # members looked at to recognise a WebDataset

Note = Callable[[str], None]  # called with the name of each member without readable content


class Member(NamedTuple):
    """A file of an archive; `chunks` can be read once, before the next member is requested."""

    name: str
    chunks: Iterator[bytes]


class ArchiveSample(NamedTuple):
    """Consecutive members of a WebDataset that share their name up to its first dot."""

    key: str
    members: Iterator[Member]


class _Header(tarfile.TarInfo):
    """Raises for a broken header and a missing end mark, where `tarfile` would end the archive silently."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Header:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # a block of zeros: the end mark
                raise
            raise tarfile.ReadError(f"{error} at byte {archive.offset}") from error


def members(where: str, chunks: Iterable[bytes], passed_over: Note) -> Iterator[Member]:
    """The plain files of a tar in their order; `passed_over` is called for links, devices and sparse files.

    where: names the archive. Raises DataError for a damaged archive, a missing end mark, and data after it.
    """
    file = ForwardFile(chunks)
    try:
        archive = tarfile.TarFile(fileobj=file, mode="r", tarinfo=_Header)
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would remember them all
            if info.isreg() and not info.issparse():
                yield Member(info.name, _content(where, archive, info))
            elif not info.isdir():
                passed_over(info.name)
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        _damaged(where, error)
    while behind := file.read(PIECE):
        if behind.strip(b"\0"):
            raise DataError(
                f"{where} goes on after the end mark of its archive (several in a row?): split it, or write it again"
            )


def _content(where: str, archive: tarfile.TarFile, info: tarfile.TarInfo) -> Iterator[bytes]:
    try:
        content = archive.extractfile(info)
        while content is not None and (piece := content.read(PIECE)):
            yield piece
    except tarfile.TarError as error:
        _damaged(where, error)


def _damaged(where: str, error: Exception) -> NoReturn:
    raise DataError(f"{where} is damaged: {error}; fetch it again") from error


def split_name(name: str) -> tuple[str, str]:
    """A member's sample and ending: ("a/000", "seg.png") of a/000.seg.png."""
    path = PurePosixPath(name)
    base, _, ending = path.name.partition(".")
    return str(path.parent / base), ending.lower()


def text_endings(key: str) -> list[str]:
    """The endings of sample parts that may hold the text `key`, the best first."""
    return list(dict.fromkeys([key.lower(), *(["txt"] if key == "text" else []), "json"]))


def is_webdataset(found: Iterable[Member], key: str) -> bool:
    """Whether the first two samples (or the only one) have the same parts, two or more, and one may hold the text.

    Reads no further than these samples: the rest may be long.
    """
    names = (split_name(member.name) for member in islice(found, LOOKED_AT))
    parts = (sorted(ending for _, ending in group) for _, group in groupby(names, key=lambda name: name[0]))
    first = next(parts, [])
    return len(first) > 1 and not set(text_endings(key)).isdisjoint(first) and next(parts, first) == first


def samples(found: Iterable[Member]) -> Iterator[ArchiveSample]:
    """The members of a WebDataset by sample."""
    for key, group in groupby(found, key=lambda member: split_name(member.name)[0]):
        yield ArchiveSample(key, group)
