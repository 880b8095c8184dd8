"""The skip ledger, line by line, for people."""

from __future__ import annotations

from datetime import UTC, datetime

from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import SampleEntry, ShardDocuments, SkipEntry
from megastable.report.skip_lines import skip_line

AT = datetime(2026, 11, 26, 12, 30, 59, tzinfo=UTC)


def test_samples_by_identity() -> None:
    entry = SampleEntry(
        time=AT, corpus="web", fingerprint="f", tokens=[[64, 128], [256, 257]], reason="noise", incident=3, step=9,
        documents=[ShardDocuments(shard="part-7", documents=[4, 5, 6, 9])],
    )  # fmt: skip
    line = skip_line(entry, 64)
    assert (line.time, line.what) == ("2026-11-26 12:30", "web, tokens 64-127, 256")
    assert line.documents == "part-7: documents 4-6, 9"
    assert (line.samples, line.reason, line.incident, line.step) == (2, "noise", 3, 9)


def test_a_line_with_very_much_is_cut() -> None:
    shards = [ShardDocuments(shard=f"s{n}", documents=list(range(0, 200, 2))) for n in range(9)]
    entry = SampleEntry(
        corpus="web", fingerprint="f", tokens=[[n, n + 1] for n in range(0, 4000, 2)], reason="x", documents=shards,
        released=True,
    )  # fmt: skip
    line = skip_line(entry, 1)
    assert (
        line.samples == 2000
        and line.time == ""
        and len(line.what) < 80
        and line.what.endswith(", read again")
    )
    assert line.documents.endswith("; 6 more shards") and line.documents.count("and 92 more ranges") == 3


def test_samples_by_position() -> None:
    line = skip_line(SkipEntry(first=8, end=16, reason="guilty"), 64)
    assert (line.what, line.samples, line.documents) == ("positions 8-15", 8, "")
    assert skip_line(SkipEntry(first=8, end=9, reason="guilty"), 64).what == "positions 8"
    gone = skip_line(SkipEntry(first=8, end=LAST_POSITION, reason="swapped", corpus="web"), 64)
    assert (gone.what, gone.samples) == ("web, from position 8 on", None)
