"""Reads what of the data is skipped: by corpus and place in it, and by position of the data order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megastable.base.errors import DataError
from megastable.base.text import make_visible, show_ranges
from megastable.data.blends import Share, blends_in_force, read_blends
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import AnyEntry, Ledger, SampleEntry
from megastable.data.skips import NOTHING, Exclusions, Skips, ranges_of
from megastable.run.directory import RunDirectory

RANGES = 4  # of a line that are told
DOCUMENTS = 8  # of a shard
SHARDS = 3  # of a line
BINS = 600  # of a strip
REASONS = 12
LINES = 60  # of the ledger


def describe_skip(entry: AnyEntry, length: int) -> dict[str, Any]:
    """A line of the skip ledger, for the page.

    Args:
        length: tokens of a sample.

    Returns:
        time: UTC; what: is skipped, by position of the data order or by tokens of a corpus's training stream;
        documents: by shard and number, if the line names them; samples: how many, None if it is not known.
    """
    sample_count: int | None
    if isinstance(entry, SampleEntry):
        tokens = [(range_first, range_end) for range_first, range_end in entry.tokens]
        what = (
            f"{entry.corpus}, tokens {show_ranges(tokens, RANGES)}{', read again' if entry.released else ''}"
        )
        sample_count = math.ceil(
            sum(range_end - range_first for range_first, range_end in tokens) / max(1, length)
        )
        shard_texts, shards = list[str](), entry.documents or []
        for shard in shards[:SHARDS]:
            noun = "document" if len(shard.documents) == 1 else "documents"
            shard_texts.append(f"{shard.shard}: {noun} {show_ranges(ranges_of(shard.documents), DOCUMENTS)}")
        if len(shards) > SHARDS:
            shard_texts.append(f"{len(shards) - SHARDS} more shards")
        document_text = "; ".join(shard_texts)
    else:
        is_ahead, document_text = entry.end >= LAST_POSITION, ""
        what = f"positions {show_ranges([(entry.first, entry.end)])}"
        what = f"from position {entry.first} on" if is_ahead else what
        what = f"{entry.corpus}, {what}" if entry.corpus else what
        sample_count = None if is_ahead or entry.corpus else entry.end - entry.first
    return {
        "time": "" if entry.time is None else entry.time.strftime("%Y-%m-%d %H:%M"), "what": make_visible(what, 200),
        "documents": make_visible(document_text, 200), "samples": sample_count,
        "reason": make_visible(entry.reason, 600),
        "incident": entry.incident, "step": entry.step,
    }  # fmt: skip


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

    def look_again(self) -> bool:
        """Read the ledgers again, if they have changed."""
        stamp = [_stamp(self.run.skips), _stamp(self.run.blends)]
        if stamp == self._stamp:
            return False
        self._stamp, self.problems = stamp, []
        try:
            ledger = Ledger.read_ledger(self.run.skips, odd_lines := list[str]())
            self._exclusions, self._reasons = ledger.exclusions, ledger.reasons
            self._count, self._newest = len(ledger.entries), ledger.entries[-LINES:]
            self.problems += odd_lines[:3]
        except (DataError, OSError) as error:
            self.problems.append(f"the skip ledger: {error}")
        try:
            blends = blends_in_force(read_blends(self.run.blends))
            self._shares = {share.name: share for blend_entry in blends for share in blend_entry.corpora}
        except (DataError, OSError) as error:
            self.problems.append(f"the ledger of blends: {error}")
        return True

    @property
    def mixture(self) -> list[tuple[str, float]]:
        """The corpora in force, with their weights."""
        return [(corpus_share.name, corpus_share.weight) for corpus_share in self._shares.values()]

    def count_skipped(self, length: int) -> int:
        """Number of samples of `length` tokens that are skipped. Corpora that are swapped out do not count."""
        named_samples = sum(tokens.count() for tokens in self._exclusions.tokens.values()) / max(1, length)
        return self._exclusions.positions.count() + round(named_samples)

    def build_content(self, length: int, cursor: int, incidents: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """The map for the page. cursor: the data position reached; incidents: with their positions."""
        incidents = list(incidents)
        marks = [
            {"incident": i["number"], "kind": range_kind, "ranges": i[range_kind][:200]}
            for i in incidents for range_kind in ("positions", "deferred", "returns") if i[range_kind]
        ]  # fmt: skip
        marked_ends = [end for incident_mark in marks for _, end in incident_mark["ranges"]]
        last_position = max([cursor, *marked_ends, *self._exclusions.positions.edges[-1:, 1].tolist()])
        corpus_maps = []
        for identity, tokens in self._exclusions.tokens.items():
            share, last_token = self._shares.get(identity.corpus), int(tokens.edges[-1:, 1].max(initial=1))
            total_tokens = last_token if share is None else max(share.tokens, last_token)
            corpus_maps.append({
                "name": make_visible(identity.corpus, 80), "tokens": total_tokens, "known": share is not None,
                "samples": round(tokens.count() / max(1, length)), "bins": binned(tokens, total_tokens),
            })  # fmt: skip
        named_corpora = {identity.corpus for identity in self._exclusions.tokens}
        for share_name, share in self._shares.items():
            if share_name not in named_corpora:
                no_skips = {"known": True, "samples": 0, "bins": []}
                corpus_maps.append({"name": make_visible(share_name, 80), "tokens": share.tokens, **no_skips})
        reason_counts = [[make_visible(reason, 300), n] for reason, n in self._reasons.most_common(REASONS)]
        skip_lines = [describe_skip(skip_entry, length) for skip_entry in reversed(self._newest)]
        return {
            "cursor": cursor, "positions": last_position, "marks": marks, "corpora": corpus_maps,
            "reasons": reason_counts, "lines": skip_lines, "count": self._count,
            "by_position": binned(self._exclusions.positions, last_position), "skipped": self.count_skipped(length),
            "swapped": [make_visible(str(name), 80) for name in self._exclusions.swapped],
        }  # fmt: skip


def binned(skips: Skips, total: int) -> list[list[float]]:
    """[bin, share of it] of every bin of [0, total) that holds some of the ranges."""
    edges: npt.NDArray[np.float64] = skips.edges.astype(np.float64)
    if not len(edges) or total <= 0:
        return []
    # How much is skipped up to each border of a bin.
    bin_borders = np.linspace(0, total, BINS + 1)
    skipped_before = np.concatenate([[0.0], np.cumsum(edges[:, 1] - edges[:, 0])])
    begun = np.searchsorted(edges[:, 0], bin_borders, side="right")
    last_begun = np.maximum(begun - 1, 0)
    inside_last = np.minimum(bin_borders, edges[last_begun, 1]) - edges[last_begun, 0]
    skipped_upto = skipped_before[last_begun] + np.where(begun > 0, inside_last, 0.0)
    bin_shares = np.diff(skipped_upto) / (total / BINS)
    return [[int(k), round(float(bin_shares[k]), 5)] for k in np.flatnonzero(bin_shares > 0)]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        file_status = path.stat()
    except OSError:
        return None
    return file_status.st_size, file_status.st_mtime_ns
