"""Follows a log line by line, and reads its end."""

from __future__ import annotations

from pathlib import Path

PIECE = 1 << 20  # bytes that are read at once


class LogTail:
    """Follows the log at `path` from byte `seen` on. It need not exist yet."""

    def __init__(self, path: Path, seen: int = 0) -> None:
        self.path, self._seen = path, seen

    @classmethod
    def at_end(cls, path: Path) -> LogTail:
        """Follow from the current end."""
        return cls(path, _size(path))

    def new(self) -> str:
        """The complete lines since the last call, without the last newline; "" = none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._seen)
                piece = file.read(PIECE)
        except OSError:
            return ""
        lines = piece[: piece.rfind(b"\n") + 1]
        self._seen += len(lines)
        return lines.decode(errors="replace").removesuffix("\n")


def end_of_log(path: Path, most: int) -> str:
    """At most the last `most` bytes of a log; "" if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - most))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
