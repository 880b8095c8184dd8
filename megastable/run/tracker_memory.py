"""Keeps what a tracker must know in the next process: which of its runs is ours. RUN/trackers/NAME.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.base import durable
from megastable.run.directory import as_json, read_object


class TrackerMemory:
    """facts: of the last process; empty in the first one, and in a copy of a run directory: it is a run of its own."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.path = root.resolve(), Path("trackers") / f"{name}.json"
        found = read_object(self.root / self.path)
        self.facts: dict[str, Any] = {} if self._copied(found) else found

    def _copied(self, found: dict[str, Any]) -> bool:
        where = found.get("directory")
        if not isinstance(where, str) or Path(where) == self.root:
            return False
        there = Path(where) / self.path  # gone if the directory was moved
        try:
            return there.exists() and not there.samefile(self.root / self.path)
        except OSError:
            return False

    def keep(self, **facts: Any) -> None:
        """Add facts. Raises OSError."""
        self.facts |= facts | {"directory": str(self.root)}
        durable.write_file(self.root / self.path, (as_json(self.facts) + "\n").encode())
