"""Plans: written, edited by a person, read again; lists by hand; the documents of an incident."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.config.recipe import load
from megastable.data.corpora import open_corpora
from megastable.data.manifest import Manifest
from megastable.data.shards import Shard
from megastable.report.sheet.values import as_csv
from megastable.run.directory import RunDirectory
from megastable_guard.incident import Incident
from megastable_tools.forensics.history import History
from megastable_tools.forensics.pruning.choose import make_plan
from megastable_tools.forensics.pruning.prune_plan import KEYS, Removal, read_plan, text_of
from megastable_tools.forensics.samples import step_sheet
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.shard_set import open_shelf
from megastable_tools.prepare.prepare import prepare_shards
from tests.conftest import write_corpus
from tests.data.texts import documents, sentencepiece_file
from tests.forensics.shelves import Plain, corpus
from tests.report.runs import NASTY, SPIKE, make_run, note

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = [Plain(name, [[([n + 1, n + 2], 0)] for n in range(5)]) for name in ("a", "b")]
    corpus(tmp_path / "corpus", shards, {"train": [("a", 0, 5), ("b", 0, 5)]}, "uint16")
    return tmp_path / "corpus"


def write(folder: Path, *lines: str, fingerprint: bool = True) -> Path:
    path = folder.parent / "plan.txt"
    key = [f"fingerprint: {Manifest.load(folder).fingerprint()}"] if fingerprint else []
    path.write_text("\n".join([*key, *lines]))
    return path


def documents_of(path: Path, folder: Path) -> dict[str, list[int]]:
    named = read_plan(path).named(folder, Manifest.load(folder))
    assert not any(of.spans for of in named.values())
    return {shard: of.documents.tolist() for shard, of in named.items()}


@given(
    names=st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3, unique=True),
    numbers=st.lists(st.integers(0, 10**12), min_size=1, max_size=4, unique=True),
    why=st.text(max_size=30),
    excerpt=st.text(max_size=200),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], numbers: list[int], why: str, excerpt: str
) -> None:
    """Whatever shards are named, and whatever their documents say."""
    path = tmp_path_factory.mktemp("plan") / "plan.txt"
    removals = [Removal(name, number, 7, why, excerpt) for name in names for number in numbers]
    manifest = Manifest.load(made(tmp_path_factory))
    text = text_of(removals, path.parent / f"odd {names[0]}\n", manifest)
    path.write_text(text, encoding="utf-8")
    plan = read_plan(path)
    found = {name: [line.document for line in lines] for name, lines in plan.lines.items()}
    assert found == dict.fromkeys(names, numbers)
    assert plan.fingerprint == manifest.fingerprint()
    assert plan.corpus == path.parent / f"odd {names[0]}\n"
    assert all(line.isprintable() for line in text.split("\n"))
    # A line that is deleted keeps its document, and says where it stood.
    first = plan.line_of(names[0], numbers[0])
    lines = text.split("\n")
    del lines[first - 1]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert numbers[0] not in [line.document for line in read_plan(path).lines.get(names[0], [])]


_MADE: list[Path] = []


def made(factory: pytest.TempPathFactory) -> Path:
    if not _MADE:
        _MADE.append(factory.mktemp("made"))
        corpus(_MADE[0], [Plain("a", [[([1], 0)]])], {"train": [("a", 0, 1)]}, "uint16")
    return _MADE[0]


def test_what_a_person_does_to_a_plan(folder: Path) -> None:
    path = write(
        folder, "", "  # a comment", "a 3", "\tb  0   # why not", "a, 1", '"b" 4#', "a 0003\r"[:1] + " 0"
    )
    assert documents_of(path, folder) == {"a": [0, 1, 3], "b": [0, 4]}
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert documents_of(path, folder) == {"a": [0, 1, 3], "b": [0, 4]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a 0", "c 0"], r"line 3: .* has no shard 'c', it has a, b"),
        (["a 0", "b 5"], r"line 3: there is no document 5 in b, which has 5 documents"),
        (["a 0", "b 1", "a 0"], r"lines 2 and 4 name the same document: 0 of a"),
        (["a 0", "a"], r"line 3: 'a' is not a shard and a document number"),
        (["a -1"], "line 2"),
        (["a 1.0"], "line 2"),
        (["a 1 2"], "line 2"),
        (["a 12345678901234567890"], "line 2"),
        (["a 1", "corpus: x"], "line 3"),
        (['"a 1'], "line 2"),
        (['"\\q" 1'], "line 2"),
        (["\x1b[31m 1 1"], r"line 2: '\\x1b"),
        (['{"shard": "a"}'], "line 2"),
        (['{"shard": "a", "document": -1}'], "line 2"),
        (["[" * 99999], "line 2"),
        (['{"a":' * 99999], "line 2"),
        (["format: 2", "a 0"], "line 2: format 2, this megastable reads format 1"),
        (["# nothing"], "names no document"),
        ([f"{shard} {n}" for shard in "ab" for n in range(5)], "every document .* delete its line 11"),
    ],
)
def test_plans_refused(folder: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        documents_of(write(folder, *lines), folder)
    assert str(folder.parent / "plan.txt") in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_files_that_are_no_plan(folder: Path) -> None:
    path = folder.parent / "plan.txt"
    with pytest.raises(DataError, match="no such plan"):
        read_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_plan(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_plan(folder)
    path.write_text("")
    with pytest.raises(DataError, match="no fingerprint"):
        documents_of(path, folder)


def test_a_plan_of_another_corpus(folder: Path) -> None:
    path = write(folder, "a 0")
    manifest = Manifest.load(folder)
    manifest.model_copy(update={"name": "other"}).save(folder)
    with pytest.raises(DataError, match=r"made for another corpus, or .* has changed since"):
        documents_of(path, folder)


@pytest.mark.parametrize(
    "text",
    [
        "a 1\nb 2\na 4\n",
        "a 1\na 1\nb 2\nb 2\na 4",
        "shard,document\na,1\nb,2\na,4\n",
        '# found\nscore,document,"shard",text\n9.5,1,a,"two\nlines, ""quoted"""\n1,2,b,\n0,4,a,x\n',
        '{"shard": "a", "document": 1}\n{"document": 2, "shard": "b", "why": "x"}\n{"shard": "a", "document": 4}\n',
        "\ufeffa 1\r\n  b,\t2  # why\r\n\r\na, 4\r\n",
        "a 1\rb 2\ra 4",
        "shard,document,first,end\na,1, , \nb, 2 ,,\na,4,,\n",
    ],
)
def test_lists_by_hand(folder: Path, text: str) -> None:
    (folder.parent / "list").write_bytes(text.encode())
    output = folder.parent / "plan.txt"
    found, _ = make_plan(folder, output, lists=[folder.parent / "list"])
    assert [(removal.shard, removal.document) for removal in found] == [("a", 1), ("a", 4), ("b", 2)]
    assert documents_of(output, folder) == {"a": [1, 4], "b": [2]}
    again = folder.parent / "again.txt"
    make_plan(folder, again, lists=[output])
    assert documents_of(again, folder) == documents_of(output, folder)


@pytest.mark.parametrize(
    "line",
    ["x" * 200_000, '"' + "x" * 200_000, "a" + "," * 100_000, "a," * 50_000, "a" + " " * 100_000 + "x",
     '{"shard": "a", "document": true}', "a -1", "a 1-3", "a 1 2"],
)  # fmt: skip
def test_a_line_of_any_length_is_refused_at_once(folder: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"plan\.txt line 1: .* is not a shard and a document number"):
        read_plan(write(folder, line, fingerprint=False))


@pytest.mark.parametrize(
    "text",
    ["shard,document\na,x\n", "shard,document\na\n", "document,shard\n1,a\n,b\n", "shard,document\na,1_0\n"],
)
def test_tables_refused(folder: Path, text: str) -> None:
    (folder.parent / "list").write_text(text)
    with pytest.raises(DataError, match=r"line [23]"):
        make_plan(folder, folder.parent / "plan.txt", lists=[folder.parent / "list"])
    assert not (folder.parent / "plan.txt").exists()


def test_what_is_asked_for_makes_no_sense(folder: Path) -> None:
    output = folder.parent / "plan.txt"
    with pytest.raises(DataError, match="no documents are selected"):
        make_plan(folder, output)
    with pytest.raises(DataError, match="give it with --scan"):
        make_plan(folder, output, lists=[folder], duplicates=True)
    with pytest.raises(DataError, match="not a corpus with a manifest"):
        make_plan(folder / "a.idx", output, lists=[folder])
    output.write_text("mine")
    listed = write(folder, "a 1").rename(folder.parent / "list.txt")
    output.write_text("mine")
    with pytest.raises(DataError, match="--overwrite"):
        make_plan(folder, output, lists=[listed])
    assert output.read_text() == "mine"
    make_plan(folder, output, lists=[listed], overwrite=True)
    assert documents_of(output, folder) == {"a": [1]}


def test_excerpts_show_the_text_and_nothing_else(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    texts = [f"{NASTY} number {n}" for n in range(4)] + documents(20)
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_shards([lines], tmp_path / "corpus", sentencepiece_file(tmp_path), name="n", validation=0.0)
    manifest = Manifest.load(tmp_path / "corpus")
    (tmp_path / "list").write_text("".join(f"{manifest.shards[0].name} {n}\n" for n in range(20)))
    make_plan(tmp_path / "corpus", tmp_path / "plan.txt", lists=[tmp_path / "list"])
    text = (tmp_path / "plan.txt").read_text()
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(re.findall(r"tokens; listed in list: ", text)) == 20
    assert r"\x1b[31m<script>" in text
    assert (
        sum(len(found) for found in documents_of(tmp_path / "plan.txt", tmp_path / "corpus").values()) == 20
    )


def guilty(**more: object) -> Incident:
    return Incident(number=1, cause="data", positions=[(232, 240), (250, 251)], **(SPIKE | more))


def test_the_documents_of_an_incident(corpus: Path, tmp_path: Path) -> None:
    """Those that hold any of the tokens of its positions, found by the edges of documents alone."""
    root = make_run(corpus, tmp_path / "run", guilty())
    found, _ = make_plan(corpus, tmp_path / "plan.txt", incidents=[f"{root}:1"])
    config = load(root / "recipe.yaml")
    length = config.model.sequence_length
    source = open_corpora(config.data.corpora, length, config.run.seed).train
    shard = Shard(corpus / "part-0")
    edges = np.append(0, np.flatnonzero(shard.raw(0, shard.tokens) == 0) + 1)
    wanted = set[int]()
    for position in (*range(232, 240), 250):
        first = source.order.locate_one(position).first_token
        wanted |= {n for n in range(shard.documents) if edges[n] < first + length and edges[n + 1] > first}
    assert [removal.document for removal in found] == sorted(wanted)
    assert all("incident 1 (spike, cause data): in " in removal.why for removal in found)
    # Beside the guilty tokens nothing of a document is shown.
    for removal in found:
        shown = [int(token) for token in removal.excerpt.lstrip("…").split()]
        tokens = shard.raw(int(edges[removal.document]), removal.tokens).tolist()
        begins = [n for n in range(len(tokens)) if tokens[n : n + len(shown)] == shown]
        assert begins and (begins[0] > 0) == removal.excerpt.startswith("…")


def test_the_spans_of_an_incident(corpus: Path, tmp_path: Path) -> None:
    """Just the tokens of its samples, but for those that end a document; what is left holds none of them."""
    root = make_run(corpus, tmp_path / "run", guilty())
    found, loss = make_plan(corpus, tmp_path / "plan.txt", incidents=[f"{root}:1"], spans=True)
    config = load(root / "recipe.yaml")
    length = config.model.sequence_length
    source = open_corpora(config.data.corpora, length, config.run.seed).train
    shard = Shard(corpus / "part-0")
    tokens = shard.raw(0, shard.tokens)
    guilty_ones = np.zeros(shard.tokens, bool)
    for position in (*range(232, 240), 250):
        first = source.order.locate_one(position).first_token
        guilty_ones[first : first + length] = True
    named = np.zeros(shard.tokens, bool)
    for removal in found:
        begin, end = shard.document_bounds(removal.document)
        first, stop = removal.span or (0, end - begin)
        assert removal.tokens == stop - first and not named[begin + first : begin + stop].any()
        named[begin + first : begin + stop] = True
    assert (guilty_ones[tokens != 0] == named[tokens != 0]).all()
    assert loss.tokens == named.sum() < 2 * guilty_ones.sum() and loss.cut


def test_a_spike_without_an_incident_is_planned_by_its_steps(corpus: Path, tmp_path: Path) -> None:
    """Steps, positions and the table of `inspect step` name the same tokens, however often the steps were done."""
    root = make_run(corpus, tmp_path / "run")
    history, output = History(root), tmp_path / "plan.txt"
    by_step, loss = make_plan(corpus, output, steps=[f"{root}:30-31"], spans=True)
    by_position, _ = make_plan(corpus, output, positions=[f"{root}:232-247"], spans=True, overwrite=True)
    (tmp_path / "step.csv").write_text(as_csv(step_sheet(history, 30, 31, 0)))
    listed, _ = make_plan(corpus, output, lists=[tmp_path / "step.csv"], spans=True, overwrite=True)
    named = [(r.shard, r.document, r.span, r.tokens) for r in by_step]
    assert [(r.shard, r.document, r.span, r.tokens) for r in by_position] == named
    assert [(r.shard, r.document, r.span, r.tokens) for r in listed] == named
    assert (
        15 * history.config.model.sequence_length < loss.tokens <= 16 * history.config.model.sequence_length
    )
    assert f"step 30 of {root}: in " in by_step[0].why or f"step 31 of {root}: in " in by_step[0].why
    whole, _ = make_plan(corpus, output, steps=[f"{root}:30-31"], overwrite=True)
    assert {r.document for r in whole} == {r.document for r in by_step} and not any(r.span for r in whole)


def test_spans_of_whole_documents_and_steps_that_are_none(corpus: Path, tmp_path: Path) -> None:
    root, output, listed = make_run(corpus, tmp_path / "run"), tmp_path / "plan.txt", tmp_path / "list"
    listed.write_text("part-0 3 1:5\npart-0 3 6:7\npart-0 4\n")
    with pytest.raises(
        DataError, match=r"list line 3 names all of document 4 of part-0, and --spans takes spans only"
    ):
        make_plan(corpus, output, lists=[listed], spans=True)
    for steps, positions, message in (
        (["30"], [], "give run and steps"), ([f"{root}:x"], [], "is not a step"),
        ([f"{root}:99"], [], "was not recorded"),
        ([], [f"{root}:9-8"], "give the first and the last one"), ([], [f"{root}:0-99999999"], "more than 10,000,000"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            make_plan(corpus, output, steps=steps, positions=positions)
    note(RunDirectory(root), 5000.0, "order_changed", old="a", new="b")
    with pytest.raises(DataError, match="order_changed"):
        make_plan(corpus, output, steps=[f"{root}:30"])
    assert not output.exists()


def test_incidents_that_cannot_be_planned(corpus: Path, tmp_path: Path) -> None:
    root = make_run(corpus, tmp_path / "run", guilty())
    output = tmp_path / "plan.txt"
    for named, message in (
        (f"{root}", "give run and number"),
        (f"{root}:x", "give run and number"),
        (
            f"{root}:7",
            "has no incident 7: its journal knows 1; for a spike without an incident name its steps, --step",
        ),
        (f"{tmp_path}:1", "not the directory of a run"),
    ):
        with pytest.raises(DataError, match=message):
            make_plan(corpus, output, incidents=[named])
    other = tmp_path / "other"
    write_corpus(other, tokens=2000, seed=3)
    with pytest.raises(DataError, match="did not train on this corpus"):
        make_plan(other, output, incidents=[f"{root}:1"])
    innocent = make_run(corpus, tmp_path / "innocent", Incident(number=1, **SPIKE))
    with pytest.raises(DataError, match=r"no document of .* is named"):
        make_plan(corpus, output, incidents=[f"{innocent}:1"])
    assert not output.exists()
    frozen = root / "recipe.yaml"
    frozen.write_text(frozen.read_text().replace("manifests: []", f"manifests: ['{'0' * 64}']"))
    with pytest.raises(DataError, match="did not train on this corpus as it is now"):
        make_plan(corpus, output, incidents=[f"{root}:1"])


def test_an_incident_before_the_order_changed(corpus: Path, tmp_path: Path) -> None:
    root = make_run(corpus, tmp_path / "run", guilty())
    note(RunDirectory(root), 5000.0, "order_changed", old="a", new="b")
    with pytest.raises(DataError, match="the order of its data changed after incident 1"):
        make_plan(corpus, tmp_path / "plan.txt", incidents=[f"{root}:1"])


def test_the_keys_are_no_shards(folder: Path) -> None:
    """A shard may be named as a key is: then it stands in quotes."""
    removals = [Removal(f"{key}:", 1) for key in KEYS]
    text = text_of(removals, folder, Manifest.load(folder))
    path = folder.parent / "plan.txt"
    path.write_text(text)
    assert list(read_plan(path).lines) == [f"{key}:" for key in KEYS]


def test_the_findings_of_a_scan(tmp_path: Path) -> None:
    """Those that are asked for, of this very corpus."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 300, 200).tolist()
    walks = [(random.integers(250) + random.integers(-3, 4, length).cumsum()) % 249 + 1 for length in lengths]
    documents = [[([*walk.tolist(), 0], 0)] for walk in walks]
    shards = [Plain("a", [*documents, [([7] * 400, 0)], documents[3]]), Plain("b", documents[:5])]
    folder, output = tmp_path / "corpus", tmp_path / "plan.txt"
    corpus(folder, shards, {"train": [("a", 0, 202), ("b", 0, 5)]}, "uint16")
    scan = tmp_path / "scan"
    result = scan_shards(open_shelf([folder]), scan, progress=False)
    copies = {("a", 201), *(("b", n) for n in range(5))}
    found, _ = make_plan(folder, output, scan=scan, duplicates=True)
    assert {(r.shard, r.document) for r in found} == copies
    worst = max(worst.score for worst in result.worst)
    found, _ = make_plan(folder, output, scan=scan, score=worst, duplicates=True, overwrite=True)
    assert {(r.shard, r.document) for r in found} == {*copies, ("a", 200)}
    assert [r.tokens for r in found if r.document == 200] == [400]
    assert {k: set(v) for k, v in documents_of(output, folder).items()} == {
        "a": {200, 201},
        "b": set(range(5)),
    }
    # The loop is odd from end to end; a copy goes as a whole, also with --spans.
    found, _ = make_plan(folder, output, scan=scan, score=worst, duplicates=True, spans=True, overwrite=True)
    assert {(r.shard, r.document) for r in found} == {*copies, ("a", 200)}
    assert all(r.span is None for r in found if r.document != 200)
    assert sum(r.tokens for r in found if (r.shard, r.document) == ("a", 200)) > 350
    with pytest.raises(DataError, match="none of its findings are selected"):
        make_plan(folder, output, scan=scan, overwrite=True)
    with pytest.raises(DataError, match=r"no document of .* is named"):
        make_plan(folder, output, scan=scan, score=worst + 1, overwrite=True)
    Manifest.load(folder).model_copy(update={"name": "other"}).save(folder)
    with pytest.raises(DataError, match="is the scan of another corpus"):
        make_plan(folder, output, scan=scan, duplicates=True, overwrite=True)
