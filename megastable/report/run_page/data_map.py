"""Reads what of the data is skipped: by corpus and place in it, and by position of the data order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import visible
from megastable.data.blends import Share, in_force, read_blends
from megastable.data.skip_ledger import AnyEntry, Ledger
from megastable.data.skips import NOTHING, Exclusions, Skips
from megastable.report.skip_lines import skip_lines
from megastable.run.directory import RunDirectory

BINS = 600  # of a strip
REASONS = 12
LINES = 60  # of the ledger


class DataMap:
    """Of one run. problems: what could not be read."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.problems: list[str] = []
        self._stamp: list[Any] = []
        self._exclusions: Exclusions = NOTHING
        self._shares: dict[str, Share] = {}
        self._reasons: Counter[str] = Counter()
        self._newest: Sequence[AnyEntry] = []
        self._count = 0  # of lines

    def look(self) -> bool:
        """Read the ledgers again, if they have changed."""
        stamp = [_stamp(self.run.skips), _stamp(self.run.blends)]
        if stamp == self._stamp:
            return False
        self._stamp, self.problems = stamp, []
        try:
            ledger = Ledger.read(self.run.skips, odd := list[str]())
            self._exclusions, self._reasons = ledger.exclusions, ledger.reasons
            self._count, self._newest = len(ledger.entries), ledger.entries[-LINES:]
            self.problems += odd[:3]
        except (DataError, OSError) as error:
            self.problems.append(f"the skip ledger: {error}")
        try:
            blends = in_force(read_blends(self.run.blends))
            self._shares = {share.name: share for entry in blends for share in entry.corpora}
        except (DataError, OSError) as error:
            self.problems.append(f"the ledger of blends: {error}")
        return True

    @property
    def mixture(self) -> list[tuple[str, float]]:
        """The corpora in force, with their weights."""
        return [(share.name, share.weight) for share in self._shares.values()]

    def skipped(self, length: int) -> int:
        """Number of samples of `length` tokens that are skipped. Corpora that are swapped out do not count."""
        named = sum(tokens.count() for tokens in self._exclusions.tokens.values()) / max(1, length)
        return self._exclusions.positions.count() + round(named)

    def content(self, length: int, cursor: int, incidents: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The map for the page. cursor: the data position reached; incidents: with their positions."""
        incidents = list(incidents)
        marks = [
            {"incident": i["number"], "kind": kind, "ranges": i[kind][:200]}
            for i in incidents for kind in ("positions", "deferred", "returns") if i[kind]
        ]  # fmt: skip
        edges = self._exclusions.positions.edges
        last = max([cursor, *(end for mark in marks for _, end in mark["ranges"]), *edges[-1:, 1].tolist()])
        corpora = []
        for identity, tokens in self._exclusions.tokens.items():
            share = self._shares.get(identity.corpus)
            total = max(share.tokens if share is not None else 0, int(tokens.edges[-1:, 1].max(initial=1)))
            corpora.append({
                "name": visible(identity.corpus, 80), "tokens": total, "known": share is not None,
                "samples": round(tokens.count() / max(1, length)), "bins": binned(tokens, total),
            })  # fmt: skip
        named = {identity.corpus for identity in self._exclusions.tokens}
        for name, share in self._shares.items():
            if name not in named:
                corpora.append(
                    {
                        "name": visible(name, 80),
                        "tokens": share.tokens,
                        "known": True,
                        "samples": 0,
                        "bins": [],
                    }
                )
        reasons = [[visible(why, 300), n] for why, n in self._reasons.most_common(REASONS)]
        lines = [
            {**asdict(line), "what": visible(line.what, 200), "documents": visible(line.documents, 200),
             "reason": visible(line.reason, 600)}
            for line in skip_lines(reversed(self._newest), length)
        ]  # fmt: skip
        return {
            "cursor": cursor, "positions": last, "marks": marks, "corpora": corpora, "reasons": reasons,
            "lines": lines, "count": self._count,
            "by_position": binned(self._exclusions.positions, last), "skipped": self.skipped(length),
            "swapped": [visible(str(name), 80) for name in self._exclusions.swapped],
        }  # fmt: skip


def binned(skips: Skips, total: int) -> list[list[float]]:
    """[bin, share of it] of every bin of [0, total) that holds some of the ranges."""
    edges: npt.NDArray[np.float64] = skips.edges.astype(np.float64)
    if not len(edges) or total <= 0:
        return []
    # How much is skipped up to each border of a bin.
    borders = np.linspace(0, total, BINS + 1)
    before = np.concatenate([[0.0], np.cumsum(edges[:, 1] - edges[:, 0])])
    n = np.searchsorted(edges[:, 0], borders, side="right")
    inside = np.where(
        n > 0, np.minimum(borders, edges[np.maximum(n - 1, 0), 1]) - edges[np.maximum(n - 1, 0), 0], 0.0
    )
    upto = before[np.maximum(n - 1, 0)] + inside
    share = np.diff(upto) / (total / BINS)
    return [[int(k), round(float(share[k]), 5)] for k in np.flatnonzero(share > 0)]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
