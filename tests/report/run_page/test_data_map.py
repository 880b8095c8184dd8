"""The skip ledger, line by line, for people."""

from __future__ import annotations

from datetime import UTC, datetime

from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import SampleEntry, ShardDocuments, SkipEntry
from megastable.report.run_page.data_map import describe_skip


def test_describe_skip_tells_tokens_documents_and_positions() -> None:
    entry = SampleEntry(
        time=datetime(2026, 11, 26, 12, 30, 59, tzinfo=UTC), corpus="web", fingerprint="f",
        tokens=[[64, 128], [256, 257]], reason="noise", incident=3, step=9,
        documents=[ShardDocuments(shard=f"part-{n}", documents=[4, 5, 6, 9]) for n in range(9)],
    )  # fmt: skip
    line = describe_skip(entry, 64)
    assert (line["time"], line["what"]) == ("2026-11-26 12:30", "web, tokens 64-127, 256")
    assert line["documents"].startswith("part-0: documents 4-6, 9; ") and line["documents"].endswith(
        "; 6 more shards"
    )
    assert [line[key] for key in ("samples", "reason", "incident", "step")] == [2, "noise", 3, 9]
    for end, corpus, told in (
        (16, None, ("positions 8-15", 8)), (9, None, ("positions 8", 1)),
        (LAST_POSITION, "web", ("web, from position 8 on", None)),
    ):  # fmt: skip
        line = describe_skip(SkipEntry(first=8, end=end, reason="bad", corpus=corpus), 64)
        assert (line["what"], line["samples"]) == told
