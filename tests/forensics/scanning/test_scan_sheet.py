"""The sheet of a scan: text around the worst piece, whatever is in it; numbers as the scan has them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable.data.tokenizer import load_tokenizer
from megastable.report.sheet import as_csv, as_html, as_json, console
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.scanning.scan_sheet import passage, sheet_of
from megastable_tools.forensics.scanning.scanned import Scan, WorstDocument
from megastable_tools.forensics.shard_set import Shelf, open_shelf
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.texts import documents, sentencepiece_file
from tests.forensics.shelves import Plain, write

HOSTILE = "<script>alert(1)</script>\x1b[31m =cmd()\u202e"
OUTSIDE = 50_000


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scan, Shelf]:
    """A corpus with its tokenizer, and in its last documents what must not get out, and ids beyond the vocabulary."""
    folder = tmp_path_factory.mktemp("sheet")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(200)))
    prepare_shards([folder / "text.jsonl"], folder / "corpus", sentencepiece_file(folder), validation=0.0)
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    shard = Shard(folder / "corpus" / "corpus-train-00000")
    edges = shard.document_edges(0, shard.documents)
    content = [shard.raw(int(a), int(b - a)).tolist() for a, b in pairwise(edges)]
    content.append([*tokenizer.encode(HOSTILE * 12), tokenizer.eod])
    content.append([OUTSIDE] * 60 + tokenizer.encode("after that"))
    content.append([])
    write(folder, Plain("mixed", [[(tokens, 0)] for tokens in content]), "uint16")
    shelf = open_shelf([folder / "mixed"], folder / "tokenizer.model")
    return scan_shards(shelf, folder / "scan", progress=False), shelf


def test_the_worst_come_first_with_their_texts(scanned: tuple[Scan, Shelf]) -> None:
    scan, shelf = scanned
    sheet = sheet_of(scan, shelf, top=10)
    assert [row["document"] for row in sheet.rows] == [row.document for row in scan.worst[:10]]
    place = {row["document"]: number for number, row in enumerate(sheet.rows)}
    outside = sheet.passages[place[201]][0].text
    assert outside.startswith(f"[{OUTSIDE}][{OUTSIDE}]") and outside.endswith("after that")
    assert "<script>alert(1)</script>" in sheet.passages[place[200]][0].text
    for number, (shown,) in sheet.passages.items():
        hot = [span for span in shown.spans if span.heat is not None]
        assert len(hot) == 1 and f"{scan.worst[number].score:.1f}" in hot[0].hint
    assert dict(sheet.facts)["documents"] == "203" and dict(sheet.facts)["without tokens"] == "1"
    assert {histogram.column for histogram in sheet.histograms} > {"score", "letters"}
    (score,) = [histogram for histogram in sheet.histograms if histogram.title == "score"]
    assert sum(score.counts) == 202
    (length,) = [histogram for histogram in sheet.histograms if histogram.title == "length"]
    assert sum(length.counts) == 203


def test_a_sheet_says_what_its_numbers_are_worth(scanned: tuple[Scan, Shelf]) -> None:
    scan, shelf = scanned
    sheet = sheet_of(scan, shelf, top=3)
    assert any("below 1,000,000, scores and kinds are unreliable" in line for line in sheet.lead)
    above = [value for name, value in sheet.facts if name.startswith("score")]
    told = {line.documents for line in scan.thresholds}
    assert len(above) == len(set(above)) == len(told)
    for line in scan.thresholds:
        assert any(f"({line.share:.3%})" in value for value in above)
    # What is expected of ordinary documents, not once more how many there are.
    one = scan.thresholds[0].model_copy(
        update={"score": 4.0, "documents": 40, "ordinary": 1.53, "usual": 0.05}
    )
    for update, false in (
        ({}, "expected false positives: about 1.5"),
        ({"ordinary": 0.01}, "expected false positives: fewer than 0.1"),
        ({"ordinary": 40.0}, "all may be false positives"),
    ):
        line = one.model_copy(update=update)
        told = sheet_of(scan.model_copy(update={"thresholds": [line], "advised": 4.0}), shelf, top=1)
        assert dict(told.facts)["score 4 or more"].endswith(f"; {false}")
        assert "40 documents have a score of 4 or more (" in told.lead[-1] and told.lead[-1].endswith(
            f"; {false}."
        )
        assert told.columns[0].limit == 4.0
    # Of a reference that is known to be good it is measured.
    for usual, share in ((0.05, "5.000%"), (0.0, "below 1.000%")):
        line = one.model_copy(update={"usual": usual})
        good = scan.model_copy(update={"thresholds": [line], "sample_documents": 300, "against": "good"})
        assert dict(sheet_of(good, shelf, top=1).facts)["score 4 or more"].endswith(
            f"about 1.5; of good {share}"
        )
    none = sheet_of(scan.model_copy(update={"advised": None}), shelf, top=1, kept=Path("scans/x"))
    assert "None stands out" in none.lead[-1] and "--score" not in none.notes[-1]
    (compression,) = [column for column in sheet.columns if column.key == "compression"]
    assert "zstd" in compression.help and all(row["compression"] > 0 for row in sheet.rows)


def test_every_form_shows_it_and_none_obeys_it(scanned: tuple[Scan, Shelf]) -> None:
    scan, shelf = scanned
    sheet = sheet_of(scan, shelf)
    terminal = Console(width=120, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal.print(console(sheet, most=5, texts=5))
    text = terminal.export_text()
    assert "<script>" in text and "\\x1b[31m" in text and "\x1b[31m" not in text and "\u202e" not in text
    assert "<script>alert(1)</script>" not in as_html(sheet)
    assert len(json.loads(as_json(sheet))["rows"]) == len(sheet.rows)
    assert as_csv(sheet).count("\n") == len(sheet.rows) + 1


def test_the_text_is_cut_at_the_document_and_around_the_piece(tmp_path: Path) -> None:
    tokens = np.arange(1, 4001).tolist()
    write(
        tmp_path, Plain("one", [[(tokens[:100], 0)], [(tokens[100:3900], 0)], [(tokens[3900:], 0)]]), "uint16"
    )
    shelf = open_shelf([tmp_path / "one"])
    given = {"shard": "one", "document": 1, "first_token": 100, "tokens": 3800, "score": 6.0, "kind": "odd"}
    given |= {"feature": "run", "value": 1.0, "why": "odd", "compression": 1.0, "features": {}}
    for piece, size, begin, end in ((100, 600, 100, 660), (120, 50, 100, 218), (3800, 100, 3752, 3900)):
        shown = passage(WorstDocument(**given, piece=piece, piece_tokens=size), shelf)
        ids = [int(token) - 1 for token in shown.text.split()]
        assert (ids[0], ids[-1] + 1) == (begin, end) and len(ids) == end - begin
        hot = next(span for span in shown.spans if span.heat is not None)
        assert int(hot.text.split()[0]) - 1 == piece and len(hot.text.split()) == min(size, 512)


def test_another_shelf_is_an_error(scanned: tuple[Scan, Shelf], tmp_path: Path) -> None:
    write(tmp_path, Plain("other", [[([1, 2, 3], 0)]]), "uint16")
    with pytest.raises(DataError, match="not the scanned corpus"):
        sheet_of(scanned[0], open_shelf([tmp_path / "other"]))
