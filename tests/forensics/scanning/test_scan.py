"""A scan of real shards: rows against a plain reading, what is planted found, interrupted and gone on with, damaged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard

from megastable.base.durable import hold
from megastable.base.errors import DataError
from megastable.data.shards import Shard
from megastable_tools.forensics import document_map
from megastable_tools.forensics.oddness.yardstick import NAMES, Lexicon, Yardstick, cut
from megastable_tools.forensics.scanning import rows as rows_module
from megastable_tools.forensics.scanning import scan as scan_module
from megastable_tools.forensics.scanning import units as units_module
from megastable_tools.forensics.scanning.rows import COMPRESSED, EMPTY, LARGEST, document_keys, measure_rows
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.scanning.scanned import Scan, SuspectDocument, suspects
from megastable_tools.forensics.scanning.units import BLOCK
from megastable_tools.forensics.shard_set import Shelf, open_shelf
from tests.conftest import VOCABULARY, write_corpus
from tests.data.texts import sentencepiece_file
from tests.forensics.shelves import Plain, write
from tests.full_disk import files_no_larger_than

OUTSIDE, REPEATED, COPY, LIKE, NONE = 300, 301, 302, 303, 304  # documents that are planted
TIMES = {"seconds", "yardstick_seconds", "duplicates_seconds", "measured_tokens", "workers"}


def walk(random: np.random.Generator, length: int) -> list[int]:
    steps = random.integers(-3, 4, length)
    return [*((random.integers(1, VOCABULARY) + steps.cumsum()) % (VOCABULARY - 1) + 1).tolist(), 0]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bare shards: 300 ordinary documents and five planted ones, then 40 ordinary ones."""
    folder, random = tmp_path_factory.mktemp("shards"), np.random.default_rng(1)
    documents = [walk(random, int(length)) for length in random.integers(20, 300, 300)]
    documents[7] = walk(random, 2500)
    like = [*documents[7]]
    like[40:43] = [1, 2, 3]
    planted = [[*documents[20][:50], *[60_000] * 100, 0], [9] * 300, documents[11], like, []]
    write(folder, Plain("a", [[(tokens, 0)] for tokens in documents + planted]), "int32")
    rest = [walk(random, int(length)) for length in random.integers(20, 300, 40)]
    write(folder, Plain("b", [[(tokens, 0)] for tokens in rest]), "int32")
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, random = tmp_path_factory.mktemp("good"), np.random.default_rng(2)
    documents = [walk(random, int(length)) for length in random.integers(20, 300, 400)]
    write(folder, Plain("good", [[(tokens, 0)] for tokens in documents]), "int32")
    return folder


def shelf(folder: Path) -> Shelf:
    return open_shelf([folder])


def outcome(scan: Scan) -> dict[str, object]:
    return scan.model_dump(exclude=TIMES)


@pytest.fixture(scope="module")
def done(shards: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scan, Path]:
    folder = tmp_path_factory.mktemp("scan") / "scan"
    scan = scan_shards(shelf(shards), folder, against=shelf(reference), near=True, progress=False)
    return scan, folder


def named(found: list[SuspectDocument]) -> dict[int, SuspectDocument]:
    return {one.document: one for one in found if one.shard == "a"}


def test_what_was_planted_is_found(done: tuple[Scan, Path]) -> None:
    scan, folder = done
    assert (scan.documents, scan.empty, len(scan.shards)) == (345, 1, 2)
    assert sum(scan.kinds.values()) == sum(scan.lengths) == 345
    assert sum(scan.scores) == 344
    assert {row.document for row in scan.worst[:2]} == {OUTSIDE, REPEATED}
    assert scan.worst[0].score >= scan.worst[1].score > 2 * scan.worst[2].score
    outside = next(row for row in scan.worst if row.document == OUTSIDE)
    assert outside.kind == "outside of the vocabulary"
    assert outside.first_token <= outside.piece < outside.first_token + outside.tokens
    found = named(list(suspects(folder, least=scan.worst[1].score, duplicates=True)))
    assert set(found) == {OUTSIDE, REPEATED, COPY, LIKE}
    assert (found[COPY].kind, found[COPY].why) == ("duplicate", "a copy of document 11 of a")
    assert found[LIKE].kind == "near duplicate" and "the same as document 7 of a" in found[LIKE].why
    assert (scan.copies.documents, scan.copies.groups) == (1, 1)
    repeated = next(row for row in scan.worst if row.document == REPEATED)
    assert f"; zstd compresses it {repeated.compression:.0f} times" in repeated.why == found[REPEATED].why
    assert [row.document for row in scan.worst if "zstd" in row.why] == [REPEATED]
    assert scan.near is not None and scan.near.documents == 1
    assert Scan.load(folder) == scan


def test_suspects_are_chosen_by_score_and_kind(done: tuple[Scan, Path]) -> None:
    scan, folder = done
    assert list(suspects(folder)) == []
    everything = list(suspects(folder, least=0.0))
    assert [(one.shard, one.document) for one in everything] == [
        *(("a", number) for number in range(304)), *(("b", number) for number in range(40)),
    ]  # fmt: skip
    (empty,) = suspects(folder, least=5.0, kinds=[EMPTY])
    assert (empty.document, empty.tokens, empty.why) == (NONE, 0, "it has no tokens")
    outside = list(suspects(folder, kinds=["outside of the vocabulary"]))
    assert set(named(outside)) == {OUTSIDE} and "usual" in named(outside)[OUTSIDE].why
    with pytest.raises(DataError, match="no kind 'nonsense': the kinds are"):
        list(suspects(folder, kinds=["nonsense"]))
    for line in scan.thresholds:
        chosen = list(suspects(folder, least=line.score))
        assert (len(chosen), sum(one.tokens for one in chosen)) == (line.documents, line.tokens)
        assert line.share == line.documents / 344
        assert sum(line.kinds.values()) <= line.documents


@pytest.mark.slow
def test_a_row_is_what_its_pieces_are(shards: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plain loop over documents; and the same when blocks are so short that documents are cut by them."""
    good = Shard(reference / "good")
    edges = good.document_edges(0, good.documents)
    tokens = good.raw(0, good.tokens)
    yardstick = Yardstick.of([(tokens, edges, document_keys(tokens, edges))], Lexicon.of(None, VOCABULARY, 0))
    shard = Shard(shards / "a")
    edges = shard.document_edges(0, shard.documents)
    table = measure_rows(yardstick, shard, 0, edges).to_pylist()
    assert [row["document"] for row in table] == list(range(shard.documents))
    for row, first, end in zip(table, edges[:-1].tolist(), edges[1:].tolist()):
        assert (row["shard"], row["first_token"], row["tokens"]) == ("a", first, end - first)
        raw = shard.raw(first, end - first)
        if first == end:
            assert (row["kind"], row["score"], row["piece_tokens"]) == (EMPTY, 0.0, 0)
            continue
        assert (row["high"] << 64 | row["low"]) == xxhash.xxh3_128_intdigest(raw.tobytes())
        pieces, owner = cut(np.array([0, end - first]))
        measured = yardstick.measure(raw, pieces, np.full(len(owner), row["low"], np.uint64))
        judged = yardstick.judge(measured)
        worst = int(judged.score.argmax())
        assert row["score"] == judged.score[worst]
        assert (row["piece"], row["piece_tokens"]) == (first + pieces[worst], np.diff(pieces)[worst])
        assert row["feature"] == NAMES[judged.feature[worst]]
        assert row["value"] == measured[row["feature"]][worst]
        for name in NAMES:
            mean = (
                measured[name].max()
                if name in LARGEST
                else np.average(measured[name], weights=np.diff(pieces))
            )
            assert row[name] == pytest.approx(mean, rel=1e-5, abs=1e-6)
    for module in (units_module, rows_module):
        monkeypatch.setattr(module, "BLOCK", 1000)
    for one, other in zip(table, measure_rows(yardstick, shard, 0, edges).to_pylist()):
        if one["tokens"] <= 1000:
            for name, value in one.items():
                about = pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
                assert other[name] == about
        else:  # measured with the tables of either half
            assert (one["high"], one["low"], one["tokens"]) == (other["high"], other["low"], other["tokens"])


@pytest.mark.slow
def test_units_and_workers_change_nothing(
    done: tuple[Scan, Path], shards: Path, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "UNIT", 3000)
    folder, given = tmp_path / "scan", dict(against=shelf(reference), near=True, progress=False)
    scan = scan_shards(shelf(shards), folder, workers=2, **given)
    assert scan.units > 10
    changed = {"units": scan.units, "quantiles": scan.quantiles, "histograms": scan.histograms}
    expected = outcome(done[0].model_copy(update=changed))
    assert outcome(scan) == expected
    assert list(suspects(folder, least=1.0, duplicates=True)) == list(
        suspects(done[1], least=1.0, duplicates=True)
    )
    assert scan_shards(shelf(shards), folder, top=5, **given).worst == scan.worst[:5]

    # As an interruption leaves it: no result, some parts missing, one damaged; of another size of units.
    (folder / document_map.RESULT).unlink()
    for number in (0, 4):
        document_map.part(folder, number).unlink()
    for path in (document_map.part(folder, 2), document_map.near_part(folder, 3)):
        path.write_bytes(path.read_bytes()[:100])
    before = document_map.part(folder, 5).stat().st_mtime_ns
    again = scan_shards(shelf(shards), folder, **given)
    assert outcome(again) == outcome(scan)
    assert document_map.part(folder, 5).stat().st_mtime_ns == before
    sizes = [pq.read_table(document_map.part(folder, n))["tokens"].to_numpy().sum() for n in (0, 2, 4)]
    assert again.measured_tokens == sum(sizes)


@pytest.mark.slow
def test_parts_of_another_size_of_units_are_measured_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = scan_shards(shelf(shards), tmp_path / "scan", progress=False)
    (tmp_path / "scan" / document_map.RESULT).unlink()
    monkeypatch.setattr(units_module, "UNIT", 5000)
    again = scan_shards(shelf(shards), tmp_path / "scan", progress=False)
    assert again.units > scan.units and again.worst == scan.worst and again.thresholds == scan.thresholds


# A scan that stops to be killed when it has measured the next unit after the first five.
CHILD = """
import signal
import sys
from pathlib import Path
from megastable.base.errors import user_errors
from megastable_tools.forensics import document_map
from megastable_tools.forensics.scanning import units
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.shard_set import open_shelf
units.UNIT = 800
write_rows = document_map.write_rows
def write_five(path, rows):
    if len(list(path.parent.iterdir())) == 5:
        print("waiting", flush=True)
        while True:
            signal.pause()
    write_rows(path, rows)
if __name__ == "__main__":
    document_map.write_rows = write_five
    with user_errors():
        scan_shards(open_shelf([Path(sys.argv[1])]), Path(sys.argv[2]), progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_scan_that_was_killed_goes_on(
    shards: Path, tmp_path: Path, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child, folder = tmp_path / "child.py", tmp_path / "scan"
    child.write_text(CHILD)
    process = subprocess.Popen(
        [sys.executable, child, shards, folder], cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(how)
    _, said = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert said == ("interrupted\n" if how == signal.SIGINT else "")
    with pytest.raises(DataError, match="interrupted: repeat the command"):
        Scan.load(folder)
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "parts").glob("*.parquet")}
    assert len(kept) == 5
    monkeypatch.setattr(units_module, "UNIT", 800)
    scan = scan_shards(shelf(shards), folder, progress=False)
    fresh = scan_shards(shelf(shards), tmp_path / "fresh", progress=False)
    assert outcome(scan) == outcome(fresh)
    assert scan.measured_tokens < fresh.measured_tokens
    assert all((folder / "parts" / name).stat().st_mtime_ns == at for name, at in kept.items())
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in (tmp_path / "fresh").iterdir()
    )


@pytest.mark.slow
def test_a_folder_of_something_else_is_left_alone(shards: Path, reference: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "thesis.tex").write_text("years of work")
    for again in (False, True):
        with pytest.raises(DataError, match=r"not the folder of a scan, thesis\.tex is in it"):
            scan_shards(shelf(shards), own, again=again, progress=False)
    assert [path.name for path in own.iterdir()] == ["thesis.tex"]
    folder = tmp_path / "scan"
    scan_shards(shelf(shards), folder, progress=False)
    with pytest.raises(DataError, match=r"something else \(other: name, the shards.*--again"):
        scan_shards(shelf(reference), folder, progress=False)
    with pytest.raises(DataError, match="other: the reference"):
        scan_shards(shelf(shards), folder, against=shelf(reference), progress=False)
    assert scan_shards(shelf(reference), folder, again=True, progress=False).name == "good"
    held = hold(folder / document_map.LOCK)
    assert held is not None
    with held, pytest.raises(DataError, match="another process scans into it"):
        scan_shards(shelf(reference), folder, progress=False)
    (folder / document_map.BEGUN).write_text("{")
    with pytest.raises(DataError, match="--again"):
        scan_shards(shelf(reference), folder, progress=False)


@pytest.mark.slow
def test_another_tokenizer_is_an_error_and_an_unknown_one_a_warning(
    corpus: Path, shards: Path, reference: Path, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "other", tokens=5000)
    manifest = tmp_path / "other" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("0" * 32, "1" * 32))
    with pytest.raises(DataError, match=r"corpus.*other.*different tokenizers"):
        scan_shards(shelf(corpus), tmp_path / "scan", against=shelf(tmp_path / "other"), progress=False)
    scan = scan_shards(shelf(shards), tmp_path / "scan", against=shelf(reference), progress=False)
    assert any("assuming that both" in warning for warning in scan.warnings)
    same = scan_shards(shelf(corpus), tmp_path / "same", against=shelf(corpus), progress=False)
    assert not any("granted" in warning for warning in same.warnings)


def test_an_unknown_vocabulary_has_the_ids_that_a_sample_lacks(tmp_path: Path) -> None:
    """A rare id is no damage: what nobody knows is taken from the size of the ids, and said."""
    random = np.random.default_rng(3)
    ordinary = [[([*random.integers(0, 300, 200).tolist()], 0)] for _ in range(60)]
    write(tmp_path, Plain("good", ordinary), "uint16")
    write(tmp_path, Plain("rare", [*ordinary[:20], [([511] * 3 + [5] * 90, 0)], [([512] * 90, 0)]]), "uint16")
    scan = scan_shards(
        open_shelf([tmp_path / "rare"]),
        tmp_path / "scan",
        against=open_shelf([tmp_path / "good"]),
        progress=False,
    )
    assert scan.vocab_size == 512
    (outside,) = [row for row in scan.worst if row.kind == "outside of the vocabulary"]
    assert outside.document == 21
    assert any("ids from 512 on" in warning for warning in scan.warnings)


def test_a_tokenizer_of_either_tells_what_its_ids_are(tmp_path: Path) -> None:
    """A bare reference is of the same tokenizer, as it is said: without, no feature of characters would be measured."""
    model = sentencepiece_file(tmp_path)
    write(tmp_path, Plain("bare", [[(list(range(3, 200)), 0)] for _ in range(9)]), "uint16")
    reference, known = open_shelf([tmp_path / "bare"]), open_shelf([tmp_path / "bare"], model)
    scan = scan_shards(known, tmp_path / "scan", against=reference, progress=False)
    assert scan.vocab_size == known.vocab_size
    assert Yardstick.load(tmp_path / "scan" / document_map.YARDSTICK).lexicon.known
    assert not any("vocabulary is not known" in warning for warning in scan.warnings)


def test_a_small_sample_is_said_to_be_one(done: tuple[Scan, Path]) -> None:
    scan, _ = done
    (warning,) = [text for text in scan.warnings if "unreliable" in text]
    assert f"learnt from only {scan.sample_tokens:,} tokens: below 1,000,000" in warning


@pytest.mark.slow
def test_what_a_loop_and_noise_compress_to(tmp_path: Path) -> None:
    """As zstd says of the first 64 KiB, also of a document that comes in several blocks."""
    random = np.random.default_rng(4)
    noise = random.integers(0, 1 << 16, BLOCK + 50_000).tolist()
    loop = [1, 2, 3, 4, 5] * 2000
    write(
        tmp_path,
        Plain("some", [[(loop, 0)], [], [(noise, 0)], [(loop[:7], 0)], [(loop + noise, 0)]]),
        "uint16",
    )
    scan = scan_shards(open_shelf([tmp_path / "some"]), tmp_path / "scan", progress=False)
    rows = document_map.read_rows(document_map.part(tmp_path / "scan", 0))
    assert rows is not None and scan.units == 1
    found = rows["compression"].to_pylist()
    for ids, ratio in zip([loop, [], noise, loop[:7], loop + noise], found, strict=True):
        head = np.array(ids, "<u2").tobytes()[:COMPRESSED]
        assert ratio == pytest.approx(len(head) / len(zstandard.compress(head, 1)) if head else 0.0, rel=0.5)
    assert found[0] > 100 and found[1] == 0 and found[2] == pytest.approx(1, abs=0.01)
    assert len(scan.quantiles["compression"]) == len(scan.shares)


def test_nothing_to_scan_and_wrong_arguments(shards: Path, tmp_path: Path) -> None:
    write(tmp_path, Plain("empty", [[([], 0)], []]), "int32")
    write(tmp_path, Plain("none", []), "int32")
    for name in ("empty", "none"):
        with pytest.raises(DataError, match=f"{name} has no tokens"):
            scan_shards(open_shelf([tmp_path / name]), tmp_path / "scan", progress=False)
    for given in ({"workers": 0}, {"top": 0}, {"threshold": 0.0}):
        with pytest.raises(DataError, match="give at least"):
            scan_shards(shelf(shards), tmp_path / "scan", progress=False, **given)
    assert not (tmp_path / "scan").exists()
    with pytest.raises(DataError, match="holds no scan"):
        Scan.load(tmp_path / "scan")
    both = scan_shards(open_shelf([tmp_path / "empty", tmp_path / "none", shards / "b"]), tmp_path / "scan")
    assert (both.documents, both.empty) == (42, 2)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_files_that_are_swapped_or_gone_are_named(shards: Path, tmp_path: Path, suffix: str) -> None:
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    opened = shelf(copy)
    (copy / f"a{suffix}").unlink()
    with pytest.raises(DataError, match=rf"a\{suffix} can no longer be read"):
        scan_shards(opened, tmp_path / "scan", progress=False)
    shutil.copy(shards / f"b{suffix}", copy / f"a{suffix}")
    with pytest.raises(DataError, match=r"describes a \.bin of"):
        shelf(copy)


def test_a_file_cut_off_while_it_is_scanned_is_named(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    units = scan_module.units

    def cut_off(*given: object) -> list[object]:
        found = list(units(*given))  # type: ignore[arg-type]
        os.truncate(copy / "a.bin", 400)
        return found

    monkeypatch.setattr(scan_module, "units", cut_off)
    with pytest.raises(DataError, match=r"a\.bin"):
        scan_shards(shelf(copy), tmp_path / "scan", progress=False)


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_what_is_measured_stays(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_module, "UNIT", 3000)
    folder = tmp_path / "scan"
    scan_shards(shelf(shards), folder, progress=False)
    complete = Scan.load(folder)
    for path in (folder / document_map.RESULT, document_map.part(folder, 1)):
        path.unlink()
    with files_no_larger_than(3000), pytest.raises(DataError, match="could not be written"):
        scan_shards(shelf(shards), folder, progress=False)
    assert not [path for path in folder.rglob("*") if ".tmp" in path.name]
    assert outcome(scan_shards(shelf(shards), folder, progress=False)) == outcome(complete)


def test_a_damaged_result_is_an_error(done: tuple[Scan, Path], tmp_path: Path) -> None:
    folder = tmp_path / "scan"
    shutil.copytree(done[1], folder)
    document_map.part(folder, 0).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="missing or damaged"):
        list(suspects(folder, least=0.0))
    (folder / document_map.RESULT).write_text('{"format": 1}')
    with pytest.raises(DataError, match=r"scan.json is damaged.*--again"):
        Scan.load(folder)


def test_progress_is_lines_on_stderr(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megastable_tools.prepare.progress.SECONDS_PER_LINE", 0.0)
    scan_shards(shelf(shards), tmp_path / "scan")
    shown = capsys.readouterr()
    assert shown.out == "" and "scanned 0.1 M of 0.1 M tokens" in shown.err


def test_a_file_that_changed_after_its_scan_is_another_one(corpus: Path, tmp_path: Path) -> None:
    """Of the same size, and described by the same manifest."""
    copy = tmp_path / "corpus"
    shutil.copytree(corpus, copy)
    scan_shards(shelf(copy), tmp_path / "scan", progress=False)
    with (copy / "part-0.bin").open("r+b") as file:
        file.seek(1000)
        file.write(b"\x01\x00" * 500)
    with pytest.raises(DataError, match="whose files changed"):
        scan_shards(shelf(copy), tmp_path / "scan", progress=False)
