"""Input files by what became of them: names and counts of those that a corpus leaves out, and how others were read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from megastable.base.text import visible

SHOWN = 3  # file names shown per reason
NOUN = re.compile(r"(file|folder|text|table|archive|document|part|link|cache|pipe|socket|device)s\b")


class CountedFiles:
    """Files and documents by what became of them (nouns in the plural: "binary files", "files and folders")."""

    def __init__(self, files: Mapping[str, Sequence[str]] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._names: dict[str, dict[str, tuple[str, int]]] = {}
        for reason, names in (files or {}).items():
            for name in names:
                self.file(reason, name)

    def document(self, reason: str) -> None:
        """Count one more document, which has no name."""
        self.counts[reason] += 1

    def file(self, reason: str, name: str, group: str | None = None) -> None:
        """Add a file, or a place in one. Those of one `group` (an archive's members with one ending, the lines of a
        file) are reported as the first one and a count: there may be millions."""
        self.counts[reason] += 1
        names = self._names.setdefault(reason, {})
        first, count = names.get(group or name, (name, 0))
        names[group or name] = (first, count + 1)

    def add(self, other: CountedFiles) -> None:
        """Add what became of the files of another reading, which may have groups of this one."""
        self.counts.update(other.counts)
        for reason, names in other._names.items():
            mine = self._names.setdefault(reason, {})
            for group, (first, count) in names.items():
                before = mine.get(group, (first, 0))
                mine[group] = (before[0], before[1] + count)

    @property
    def files(self) -> dict[str, list[str]]:
        """The names by reason."""
        return {
            reason: [
                first + (f" and {count - 1:,} more" if count > 1 else "") for first, count in names.values()
            ]
            for reason, names in self._names.items()
        }


def told(
    counts: Mapping[str, int], files: Mapping[str, Sequence[str]], where_all: str = ": --json has all"
) -> list[str]:
    """One text per reason: count, reason and the first names. where_all: added after "N more"."""
    return [
        f"{count:,} {reason if count > 1 else _one(reason)}"
        + (f" ({_some(files[reason], where_all)})" if reason in files else "")
        for reason, count in counts.items()
    ]


def _one(reason: str) -> str:
    """A reason for a single file: "binary file", "hidden file or folder"."""
    several = reason.split(" and ")
    return " or ".join(NOUN.sub(r"\1", part, count=part.count(",") + 1) for part in several)


def _some(names: Sequence[str], where_all: str) -> str:
    shown, rest = ", ".join(map(visible, names[:SHOWN])), len(names) - SHOWN
    return f"{shown}, and {rest:,} more{where_all}" if rest > 0 else shown
