"""A scan of real shards: rows against a plain reading, what is planted found, killed and gone on with, damaged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard

from megastable.base.durable import lock_file
from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.oddness.features import NAMES, Lexicon
from megastable_tools.forensics.oddness.yardstick import PIECE, Yardstick, cut_documents
from megastable_tools.forensics.scanning import rows as rows_module
from megastable_tools.forensics.scanning import units as units_module
from megastable_tools.forensics.scanning.rows import COMPRESSED, EMPTY, LARGEST, document_keys, measure_rows
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.scanning.scan_sheet import scan_sheet_of
from megastable_tools.forensics.scanning.scanned import (
    BINS,
    CHECKED,
    LENGTHS,
    RATE,
    STEP,
    Scan,
    ScanSummary,
    SuspectDocument,
    advise_score,
    find_suspects,
    measure_excess,
)  # fmt: skip
from megastable_tools.forensics.shard_set import open_shelf
from tests.conftest import VOCABULARY
from tests.data.texts import sentencepiece_file
from tests.forensics.shelves import Plain, write
from tests.full_disk import files_no_larger_than

OUTSIDE, REPEATED, COPY, LIKE, NONE = 300, 301, 302, 303, 304  # documents that are planted
TIMES = {"seconds", "yardstick_seconds", "duplicates_seconds", "measured_tokens", "workers"}
HOSTILE = "<script>alert(1)</script>\x1b[31m =cmd()\u202e"


def walk(random: np.random.Generator, length: int) -> list[int]:
    steps = random.integers(-3, 4, length)
    return [*((random.integers(1, VOCABULARY) + steps.cumsum()) % (VOCABULARY - 1) + 1).tolist(), 0]


def write_shard(folder: Path, name: str, documents: list[list[int]], dtype: str = "int32") -> None:
    write(folder, Plain(name, [[(tokens, 0)] for tokens in documents]), dtype)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bare shards: 300 ordinary documents and five planted ones, then 40 ordinary ones."""
    folder, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(1)
    documents = [walk(random, int(length)) for length in random.integers(20, 300, 300)]
    documents[7] = walk(random, 2500)
    like = [*documents[7]]
    like[40:43] = [1, 2, 3]
    planted = [[*documents[20][:50], *[60_000] * 100, 0], [9] * 300, documents[11], like, []]
    write_shard(folder, "a", documents + planted)
    write_shard(folder, "b", [walk(random, int(length)) for length in random.integers(20, 300, 40)])
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("good"), np.random.default_rng(2)
    write_shard(folder, "good", [walk(random, int(length)) for length in random.integers(20, 300, 400)])
    return folder


def scan_into(shards: Path, folder: Path, against: Path | None = None, **options: Any) -> Scan:
    baseline = None if against is None else open_shelf([against])
    return scan_shards(open_shelf([shards]), folder, against=baseline, progress=False, **options)


@pytest.fixture(scope="module")
def done(shards: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scan, Path]:
    folder = tmp_path_factory.mktemp("scan") / "scan"
    return scan_into(shards, folder, reference, near=True), folder


def outcome(scan: Scan) -> dict[str, object]:
    return scan.model_dump(exclude=TIMES)


def named(found: list[SuspectDocument]) -> dict[int, SuspectDocument]:
    return {one.document: one for one in found if one.shard == "a"}


def test_scan_finds_what_was_planted(done: tuple[Scan, Path]) -> None:
    scan, folder = done
    assert (scan.documents, scan.empty, len(scan.shards)) == (345, 1, 2)
    assert sum(scan.kinds.values()) == sum(scan.lengths) == 345 == sum(scan.scores) + 1
    assert {row.document for row in scan.worst[:2]} == {OUTSIDE, REPEATED}
    assert scan.worst[0].score >= scan.worst[1].score > 2 * scan.worst[2].score
    outside, repeated = (next(row for row in scan.worst if row.document == d) for d in (OUTSIDE, REPEATED))
    assert outside.kind == "outside of the vocabulary"
    assert outside.first_token <= outside.piece < outside.first_token + outside.tokens
    found = named(list(find_suspects(folder, least=scan.worst[1].score, duplicates=True)))
    assert set(found) == {OUTSIDE, REPEATED, COPY, LIKE}
    assert (found[COPY].kind, found[COPY].why) == ("duplicate", "a copy of document 11 of a")
    assert found[LIKE].kind == "near duplicate" and "the same as document 7 of a" in found[LIKE].why
    assert f"; zstd compresses it {repeated.compression:.0f} times" in repeated.why == found[REPEATED].why
    assert [row.document for row in scan.worst if "zstd" in row.why] == [REPEATED]
    assert (scan.copies.documents, scan.copies.groups) == (1, 1)
    assert scan.near is not None and scan.near.documents == 1 and Scan.load_result(folder) == scan
    (warning,) = [text for text in scan.warnings if "unreliable" in text]
    assert f"learnt from only {scan.sample_tokens:,} tokens: below 1,000,000" in warning


def test_suspects_are_chosen_by_score_and_kind(done: tuple[Scan, Path]) -> None:
    scan, folder = done
    assert list(find_suspects(folder)) == []
    everything = [(one.shard, one.document) for one in find_suspects(folder, least=0.0)]
    assert everything == [*(("a", number) for number in range(304)), *(("b", number) for number in range(40))]
    (empty,) = find_suspects(folder, least=5.0, kinds=[EMPTY])
    assert (empty.document, empty.tokens, empty.why) == (NONE, 0, "it has no tokens")
    outside = named(list(find_suspects(folder, kinds=["outside of the vocabulary"])))
    assert set(outside) == {OUTSIDE} and "usual" in outside[OUTSIDE].why
    with pytest.raises(DataError, match="no kind 'nonsense': the kinds are"):
        list(find_suspects(folder, kinds=["nonsense"]))
    for line in scan.thresholds:
        chosen = list(find_suspects(folder, least=line.score))
        assert (len(chosen), sum(one.tokens for one in chosen)) == (line.documents, line.tokens)
        assert line.share == line.documents / 344 and sum(line.kinds.values()) <= line.documents


@pytest.mark.slow
def test_measure_rows_is_a_plain_loop_over_pieces(
    shards: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same when blocks are so short that documents are cut by them."""
    good, shard = Shard(reference / "good"), Shard(shards / "a")
    edges, tokens = good.document_edges(0, good.documents), good.read_raw(0, good.tokens)
    yardstick = Yardstick.learn_from(
        [(tokens, edges, document_keys(tokens, edges))], Lexicon.of_tokenizer(None, VOCABULARY, 0)
    )
    edges = shard.document_edges(0, shard.documents)
    table = measure_rows(yardstick, shard, 0, edges).to_pylist()
    assert [row["document"] for row in table] == list(range(shard.documents))
    for row, first, end in zip(table, edges[:-1].tolist(), edges[1:].tolist()):
        assert (row["shard"], row["first_token"], row["tokens"]) == ("a", first, end - first)
        raw = shard.read_raw(first, end - first)
        if first == end:
            assert (row["kind"], row["score"], row["piece_tokens"]) == (EMPTY, 0.0, 0)
            continue
        assert (row["high"] << 64 | row["low"]) == xxhash.xxh3_128_intdigest(raw.tobytes())
        head = raw.tobytes()[:COMPRESSED]
        assert row["compression"] == pytest.approx(len(head) / len(zstandard.compress(head, 1)), rel=0.5)
        pieces, owner = cut_documents(np.array([0, end - first]))
        sizes = np.diff(pieces)
        measured = yardstick.measure_features(raw, pieces, np.full(len(owner), row["low"], np.uint64))
        judged = yardstick.judge_features(measured)
        worst = int(judged.score.argmax())
        assert row["score"] == judged.score[worst]
        assert (row["piece"], row["piece_tokens"]) == (first + pieces[worst], sizes[worst])
        assert row["feature"] == NAMES[judged.feature[worst]]
        assert row["value"] == measured[row["feature"]][worst]
        for name in NAMES:
            mean = measured[name].max() if name in LARGEST else np.average(measured[name], weights=sizes)
            assert row[name] == pytest.approx(mean, rel=1e-5, abs=1e-6)
    for module in (units_module, rows_module):
        monkeypatch.setattr(module, "BLOCK", 1000)
    for one, other in zip(table, measure_rows(yardstick, shard, 0, edges).to_pylist()):
        long = one["tokens"] > 1000  # measured with the tables of either half
        for name in ("high", "low", "tokens") if long else one:
            about = (
                pytest.approx(one[name], rel=1e-5, abs=1e-6) if isinstance(one[name], float) else one[name]
            )
            assert other[name] == about


@pytest.mark.slow
def test_scan_is_the_same_in_any_units_and_workers_and_completes_what_is_missing(
    done: tuple[Scan, Path], shards: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "UNIT", 3000)
    folder = tmp_path / "scan"
    scan = scan_into(shards, folder, reference, near=True, workers=2)
    assert scan.units > 10
    changed = {"units": scan.units, "quantiles": scan.quantiles, "histograms": scan.histograms}
    assert outcome(scan) == outcome(done[0].model_copy(update=changed))
    everything = [list(find_suspects(of, least=1.0, duplicates=True)) for of in (folder, done[1])]
    assert everything[0] == everything[1]
    assert scan_into(shards, folder, reference, near=True, top=5).worst == scan.worst[:5]

    # As an interruption leaves it: no result, some parts missing, one damaged; and a disk that is full.
    (folder / resumable_map.RESULT).unlink()
    for number in (0, 4):
        resumable_map.part_path(folder, number).unlink()
    for path in (resumable_map.part_path(folder, 2), resumable_map.near_part_path(folder, 3)):
        path.write_bytes(path.read_bytes()[:100])
    before = resumable_map.part_path(folder, 5).stat().st_mtime_ns
    with files_no_larger_than(3000), pytest.raises(DataError, match="could not be written"):
        scan_into(shards, folder, reference, near=True)
    assert not [path for path in folder.rglob("*") if ".tmp" in path.name]
    again = scan_into(shards, folder, reference, near=True)
    assert outcome(again) == outcome(scan) and 0 < again.measured_tokens < scan.measured_tokens / 2
    assert resumable_map.part_path(folder, 5).stat().st_mtime_ns == before

    # Of another size of units everything is measured again.
    (folder / resumable_map.RESULT).unlink()
    monkeypatch.setattr(units_module, "UNIT", 5000)
    again = scan_into(shards, folder, reference, near=True)
    assert again.units < scan.units and (again.worst, again.thresholds) == (scan.worst, scan.thresholds)


# A scan that stops to be killed when it has measured the next unit after the first five.
CHILD = """
import signal
import sys
from pathlib import Path
from megastable.base.errors import user_errors
from megastable_tools.forensics import resumable_map
from megastable_tools.forensics.scanning import units
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.shard_set import open_shelf
units.UNIT = 800
write_rows = resumable_map.write_rows
def write_five(path, rows):
    if len(list(path.parent.iterdir())) == 5:
        print("waiting", flush=True)
        while True:
            signal.pause()
    write_rows(path, rows)
if __name__ == "__main__":
    resumable_map.write_rows = write_five
    with user_errors():
        scan_shards(open_shelf([Path(sys.argv[1])]), Path(sys.argv[2]), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_scan_goes_on_after_it_was_killed(
    shards: Path, tmp_path: Path, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, folder, root = tmp_path / "child.py", tmp_path / "scan", Path(__file__).parents[3]
    child.write_text(CHILD)
    process = subprocess.Popen(
        [sys.executable, child, shards, folder], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(how)
    _, said = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert said == ("interrupted\n" if how == signal.SIGINT else "")
    with pytest.raises(DataError, match="interrupted: repeat the command"):
        Scan.load_result(folder)
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "parts").glob("*.parquet")}
    assert len(kept) == 5
    monkeypatch.setattr(units_module, "UNIT", 800)
    scan, fresh = scan_into(shards, folder), scan_into(shards, tmp_path / "fresh")
    assert outcome(scan) == outcome(fresh) and scan.measured_tokens < fresh.measured_tokens
    assert all((folder / "parts" / name).stat().st_mtime_ns == at for name, at in kept.items())
    names = [sorted(path.name for path in of.iterdir()) for of in (folder, tmp_path / "fresh")]
    assert names[0] == names[1]


@pytest.mark.slow
def test_scan_leaves_folders_of_something_else_alone(corpus: Path, shards: Path, tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "scan"
    own.mkdir()
    (own / "thesis.tex").write_text("years of work")
    for again in (False, True):
        with pytest.raises(DataError, match=r"not the folder of a scan, thesis\.tex is in it"):
            scan_into(shards, own, again=again)
    assert [path.name for path in own.iterdir()] == ["thesis.tex"]
    shutil.copytree(corpus, tmp_path / "copy")
    scan_into(tmp_path / "copy", folder)
    with pytest.raises(DataError, match=r"something else \(other: name, the shards.*--again"):
        scan_into(shards, folder)
    with pytest.raises(DataError, match="other: the reference"):
        scan_into(tmp_path / "copy", folder, tmp_path / "copy")
    with (tmp_path / "copy/part-0.bin").open("r+b") as file:  # of the same size and manifest
        file.seek(1000)
        file.write(b"\x01\x00" * 500)
    with pytest.raises(DataError, match="whose files changed"):
        scan_into(tmp_path / "copy", folder)
    assert scan_into(shards, folder, again=True).name == open_shelf([shards]).name
    held = lock_file(folder / resumable_map.LOCK)
    assert held is not None
    with held, pytest.raises(DataError, match="another process scans into it"):
        scan_into(shards, folder)
    (folder / resumable_map.BEGUN).write_text("{")
    with pytest.raises(DataError, match="--again"):
        scan_into(shards, folder)


def test_scan_refuses_nothing_wrong_arguments_and_damage(
    done: tuple[Scan, Path], shards: Path, tmp_path: Path
) -> None:
    write_shard(tmp_path, "empty", [[], []])
    with pytest.raises(DataError, match="empty has no tokens"):
        scan_into(tmp_path / "empty.idx", tmp_path / "scan")
    for given in ({"workers": 0}, {"top": 0}, {"threshold": 0.0}):
        with pytest.raises(DataError, match="give at least"):
            scan_into(shards, tmp_path / "scan", **given)
    assert not (tmp_path / "scan").exists()
    with pytest.raises(DataError, match="holds no scan"):
        Scan.load_result(tmp_path / "scan")
    shutil.copytree(done[1], tmp_path / "scan")
    resumable_map.part_path(tmp_path / "scan", 0).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="missing or damaged"):
        list(find_suspects(tmp_path / "scan", least=0.0))
    (tmp_path / "scan" / resumable_map.RESULT).write_text('{"format": 1}')
    with pytest.raises(DataError, match=r"scan.json is damaged.*--again"):
        Scan.load_result(tmp_path / "scan")
    shutil.copytree(shards, tmp_path / "copy")
    opened = open_shelf([tmp_path / "copy"])
    (tmp_path / "copy/a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin can no longer be read"):
        scan_shards(opened, tmp_path / "gone", progress=False)


# The advised score, from tables of scores


def tally_scores(scores: np.ndarray, lengths: np.ndarray) -> ScanSummary:
    made = ScanSummary(1)
    made.documents[1] += np.bincount(np.minimum(scores / STEP, BINS - 1).astype(int), minlength=BINS)
    made.lengths += np.bincount(np.frexp(lengths.astype(float))[1], minlength=LENGTHS)
    return made


def drawn(random: np.random.Generator, pieces: np.ndarray, heavier: float = 1.0) -> np.ndarray:
    """Scores of ordinary documents of so many pieces: each the worst of its pieces'."""
    return np.array([heavier * (-np.log10(random.random(int(n)))).max() for n in pieces])


@pytest.mark.parametrize(("documents", "share"), [(300, 0.05), (3000, 0.001), (3000, 0.15), (30_000, 0.01)])
def test_advised_names_what_is_planted_and_little_else(documents: int, share: float) -> None:
    random = np.random.default_rng(documents)
    pieces = random.integers(1, 40, documents)
    scores, bad = drawn(random, pieces), random.random(documents) < share
    scores[bad] = random.uniform(7.5, 9, bad.sum())
    made = tally_scores(scores, pieces * PIECE)
    score = advise_score(made, measure_excess(made))
    assert score is not None and score >= CHECKED and (scores[bad] >= score).all()
    assert int((scores[~bad] >= score).sum()) <= max(6, 2 * RATE * bad.sum())
    # Scores that are a third higher than they should be: that is seen where ordinary documents still are.
    made = tally_scores(drawn(random, pieces, heavier=1.3), pieces * PIECE)
    naive, score = advise_score(made, 1.0), advise_score(made, measure_excess(made))
    assert score is None or naive is None or score >= naive


# The sheet


def test_sheet_shows_the_worst_with_texts_and_obeys_none(tmp_path: Path) -> None:
    tokenizer, random = load_tokenizer(sentencepiece_file(tmp_path)), np.random.default_rng(0)
    usual = [random.integers(3, 300, 100).tolist() for _ in range(200)]
    write_shard(tmp_path, "some", [*usual, [*tokenizer.encode(HOSTILE)[:60], *[50_000] * 40], []], "uint16")
    shelf = open_shelf([tmp_path / "some"], tmp_path / "tokenizer.model")
    scan = scan_shards(shelf, tmp_path / "scan", progress=False)
    sheet = scan_sheet_of(scan, shelf, top=10)
    assert [row["document"] for row in sheet.rows] == [row.document for row in scan.worst[:10]]
    texts = {row["document"]: sheet.passages[number][0].text for number, row in enumerate(sheet.rows)}
    assert texts[200].endswith("[50000][50000]") and "<script>alert(1)</script>" in texts[200]
    for number, (shown,) in sheet.passages.items():
        (hot,) = [span for span in shown.spans if span.heat is not None]
        assert f"{scan.worst[number].score:.1f}" in hot.hint
    sums = {histogram.title: sum(histogram.counts) for histogram in sheet.histograms}
    assert (sums["score"], sums["length"]) == (201, 202)
    line = scan.thresholds[0].model_copy(
        update={"score": 4.0, "documents": 40, "ordinary": 1.53, "usual": 0.0}
    )
    told = scan.model_copy(
        update={"thresholds": [line], "advised": 4.0, "sample_documents": 300, "against": "good"}
    )
    facts = dict(scan_sheet_of(told, shelf).facts)
    assert facts["score 4 or more"].endswith("expected false positives: about 1.5; of good below 1.000%")
    write_shard(tmp_path, "other", [[1, 2, 3]], "uint16")
    with pytest.raises(DataError, match="not the scanned corpus"):
        scan_sheet_of(scan, open_shelf([tmp_path / "other"]))
