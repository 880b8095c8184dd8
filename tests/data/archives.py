"""Tar archives for the tests of what is read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Sequence

import zstandard


def tar_bytes(members: Sequence[tuple[str | tarfile.TarInfo, bytes]]) -> bytes:
    """An archive of these members, each a name or a header of its own, with its content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for named, content in members:
            info = tarfile.TarInfo(named) if isinstance(named, str) else named
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """A link, a device or a folder."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}
