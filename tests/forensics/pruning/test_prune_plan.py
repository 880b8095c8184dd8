"""Plans: written, edited by a person, read again; lists by hand; documents and spans of incidents, steps and scans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.manifest import Manifest
from megastable.data.shards import Shard
from megastable.report.sheet.model import as_csv
from megastable.run.directory import RunDirectory
from megastable_guard.incident import Incident
from megastable_tools.forensics.history import History
from megastable_tools.forensics.pruning.choose import make_plan
from megastable_tools.forensics.pruning.prune_plan import KEYS, Removal, format_plan, read_plan
from megastable_tools.forensics.samples import step_sheet
from megastable_tools.forensics.scanning.scan import scan_shards
from megastable_tools.forensics.shard_set import open_shelf
from tests.conftest import write_corpus
from tests.forensics.shelves import Plain, corpus
from tests.report.runs import SPIKE, make_run, note

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=12)
BAD = [*range(232, 240), 250]  # positions
SPAN = "a 1 8:9"  # nothing but what ends a document, which stays


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of five documents of nine tokens."""
    shards = [Plain(name, [[([*range(n + 1, n + 9), 0], 0)] for n in range(5)]) for name in ("a", "b")]
    corpus(tmp_path / "corpus", shards, {"train": [("a", 0, 5), ("b", 0, 5)]}, "uint16")
    return tmp_path / "corpus"


def write(folder: Path, *lines: str, fingerprint: bool = True) -> Path:
    path = folder.parent / "plan.txt"
    key = [f"fingerprint: {Manifest.load_manifest(folder).fingerprint()}"] if fingerprint else []
    path.write_text("\n".join([*key, *lines]))
    return path


def documents_of(path: Path, folder: Path) -> dict[str, list[int]]:
    named = read_plan(path).select_removals(folder, Manifest.load_manifest(folder))
    assert not any(of.spans for of in named.values())
    return {shard: of.documents.tolist() for shard, of in named.items()}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    made = tmp_path_factory.mktemp("made")
    return corpus(made, [Plain("a", [[([1], 0)]])], {"train": [("a", 0, 1)]}, "uint16")


@given(
    names=st.lists(NAMES.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3, unique=True),
    numbers=st.lists(st.integers(0, 10**12), min_size=1, max_size=4, unique=True),
    why=st.text(max_size=30), excerpt=st.text(max_size=200),
)  # fmt: skip
def test_read_plan_reads_what_text_of_writes(
    tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, names: list[str], numbers: list[int], why: str,
    excerpt: str,
) -> None:  # fmt: skip
    """Whatever shards are named, and whatever their documents say."""
    path = tmp_path_factory.mktemp("plan") / "plan.txt"
    removals = [Removal(name, number, 7, why, excerpt) for name in names for number in numbers]
    text = format_plan(removals, path.parent / f"odd {names[0]}\n", manifest)
    path.write_text(text, encoding="utf-8")
    plan = read_plan(path)
    found = {name: [line.document for line in lines] for name, lines in plan.lines.items()}
    assert found == dict.fromkeys(names, numbers)
    assert (plan.fingerprint, plan.corpus) == (manifest.fingerprint(), path.parent / f"odd {names[0]}\n")
    assert all(line.isprintable() for line in text.split("\n"))
    # A line that is deleted keeps its document, and says where it stood.
    lines = text.split("\n")
    del lines[plan.line_of(names[0], numbers[0]) - 1]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert numbers[0] not in [line.document for line in read_plan(path).lines.get(names[0], [])]


def test_read_plan_tells_keys_from_shards(folder: Path) -> None:
    """A shard may be named as a key is: then it stands in quotes."""
    path = folder.parent / "plan.txt"
    path.write_text(
        format_plan([Removal(f"{key}:", 1) for key in KEYS], folder, Manifest.load_manifest(folder))
    )
    assert list(read_plan(path).lines) == [f"{key}:" for key in KEYS]


def test_read_plan_takes_what_a_person_writes(folder: Path) -> None:
    path = write(folder, "", "  # a comment", "a 3", "\tb  0   # why not", "a, 1", '"b" 4#', "a 0")
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
        (["a -1"], "line 2"), (["a 1.0"], "line 2"), (["a 1 2"], "line 2"),
        (["a 1", "corpus: x"], "line 3"), (['"a 1'], "line 2"), (['"\\q" 1'], "line 2"),
        (["\x1b[31m 1 1"], r"line 2: '\\x1b"), (['{"shard": "a"}'], "line 2"),
        (['{"shard": "a", "document": -1}'], "line 2"), (['{"shard": "a", "document": true}'], "line 2"),
        (["[" * 99999], "line 2"), (['{"a":' * 99999], "line 2"), (["x" * 200_000], "line 2"),
        (["a" + "," * 100_000], "line 2"), (["a" + " " * 100_000 + "x"], "line 2"),
        (["format: 2", "a 0"], "line 2: format 2, this megastable reads format 1"),
        (["# nothing"], "names no document"),
        ([f"{shard} {n}" for shard in "ab" for n in range(5)], "every document .* delete its line 11"),
        (["a 1 4:4"], "line 2: the span 4:4 is empty"), (["a 1 5:4"], "line 2: the span 5:4 is empty"),
        (["a 1 2:3", "a 1"], "line 3 names document 1 of a as a whole, another line a span"),
        (["a 1 2-3"], "line 2: .* is not a shard and a document number"),
        (['{"shard": "a", "document": 1, "first": 2}'], "line 2"),
    ],
)  # fmt: skip
def test_read_plan_refuses_and_names_the_line(folder: Path, lines: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        documents_of(write(folder, *lines), folder)
    assert str(folder.parent / "plan.txt") in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_read_plan_refuses_files_that_are_no_plan_of_this_corpus(folder: Path) -> None:
    path = folder.parent / "plan.txt"
    with pytest.raises(DataError, match="no such plan"):
        read_plan(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_plan(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_plan(folder)
    with pytest.raises(DataError, match="no fingerprint"):
        documents_of(write(folder, fingerprint=False), folder)
    path = write(folder, "a 0")
    Manifest.load_manifest(folder).model_copy(update={"name": "other"}).save_manifest(folder)
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
        "a 1 0:4\nb 2 # why\na, 4\na 1 3:9",
        "shard,document,first,end\na,1,0,8\nb,2,,\na,4,0,9\n",
        '{"shard": "a", "document": 1, "first": 0, "end": 8}\na 4\nb 2',
    ],
)
def test_make_plan_reads_lists_by_hand(folder: Path, text: str) -> None:
    (folder.parent / "list").write_bytes(text.encode())
    output, again = folder.parent / "plan.txt", folder.parent / "again.txt"
    found, _ = make_plan(folder, output, lists=[folder.parent / "list"])
    assert [(removal.shard, removal.document) for removal in found] == [("a", 1), ("a", 4), ("b", 2)]
    make_plan(folder, again, lists=[output])
    assert documents_of(again, folder) == documents_of(output, folder) == {"a": [1, 4], "b": [2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [("shard,document\na,x\n", "line 2"), ("shard,document\na\n", "line 2"), ("document,shard\n1,a\n,b\n", "line 3"),
     ("shard,document\na,1_0\n", "line 2"), (SPAN, "nothing to plan"), ("a 1 3:10", "a list names a span of it up to")],
)  # fmt: skip
def test_make_plan_refuses_lists_without_writing(folder: Path, text: str, message: str) -> None:
    (folder.parent / "list").write_text(text)
    with pytest.raises(DataError, match=message):
        make_plan(folder, folder.parent / "plan.txt", lists=[folder.parent / "list"])
    assert not (folder.parent / "plan.txt").exists()


def found_bad(**more: object) -> Incident:
    return Incident(number=1, cause="data", positions=[(232, 240), (250, 251)], **(SPIKE | more))


def test_make_plan_finds_the_documents_and_spans_of_an_incident(corpus: Path, tmp_path: Path) -> None:
    """Those that hold any of the tokens of its positions; as spans just these, but for tokens that end a document."""
    root, output = make_run(corpus, tmp_path / "run", found_bad()), tmp_path / "plan.txt"
    history, shard = History(root), Shard(corpus / "part-0")
    length, order = history.config.model.sequence_length, history.library_at().source.order
    tokens = shard.read_raw(0, shard.tokens)
    wanted = np.zeros(shard.tokens, bool)
    for first in order.locate_samples(np.array(BAD)).first_token.tolist():
        wanted[first : first + length] = True
    found, _ = make_plan(corpus, output, incidents=[f"{root}:1"])
    owner = np.cumsum(np.append(0, tokens[:-1] == 0))
    assert [removal.document for removal in found] == np.unique(owner[wanted]).tolist()
    assert all("incident 1 (spike, cause data): in " in removal.why for removal in found)
    for removal in found:  # beside the bad tokens nothing of a document is shown
        shown = [int(token) for token in removal.excerpt.lstrip("…").split()]
        own = tokens[owner == removal.document].tolist()
        begins = [n for n in range(len(own)) if own[n : n + len(shown)] == shown]
        assert begins and (begins[0] > 0) == removal.excerpt.startswith("…")
    spans, loss = make_plan(corpus, output, incidents=[f"{root}:1"], spans=True, overwrite=True)
    named = np.zeros(shard.tokens, bool)
    for removal in spans:
        begin, end = shard.document_bounds(removal.document)
        first, stop = removal.span or (0, end - begin)
        assert removal.tokens == stop - first and not named[begin + first : begin + stop].any()
        named[begin + first : begin + stop] = True
    assert (wanted[tokens != 0] == named[tokens != 0]).all()
    assert loss.tokens == named.sum() < 2 * wanted.sum() and loss.cut


def test_make_plan_names_the_same_by_steps_positions_and_table(corpus: Path, tmp_path: Path) -> None:
    root, output = make_run(corpus, tmp_path / "run"), tmp_path / "plan.txt"
    history = History(root)
    (tmp_path / "step.csv").write_text(as_csv(step_sheet(history, 30, 31, 0)))
    given_ = (
        {"steps": [f"{root}:30-31"]},
        {"positions": [f"{root}:232-247"]},
        {"lists": [tmp_path / "step.csv"]},
    )
    plans = [make_plan(corpus, output, **one, spans=True, overwrite=True) for one in given_]  # type: ignore[arg-type]
    first, *others = ([(r.shard, r.document, r.span, r.tokens) for r in found] for found, _ in plans)
    assert others == [first, first]
    length = history.config.model.sequence_length
    assert 15 * length < plans[0][1].tokens <= 16 * length
    assert {r.why.partition(" of ")[0] for r in plans[0][0]} >= {"step 30"}
    whole, _ = make_plan(corpus, output, steps=[f"{root}:30-31"], overwrite=True)
    assert {r.document for r in whole} == {document for _, document, _, _ in first}
    assert not any(r.span for r in whole)


def test_make_plan_refuses_runs_that_cannot_be_planned(corpus: Path, tmp_path: Path) -> None:
    root, output, listed = (
        make_run(corpus, tmp_path / "run", found_bad()),
        tmp_path / "plan.txt",
        tmp_path / "list",
    )
    harmless = make_run(corpus, tmp_path / "harmless", Incident(number=1, **SPIKE))
    listed.write_text("part-0 3 1:5\npart-0 3 6:7\npart-0 4\n")
    with pytest.raises(
        DataError, match=r"list line 3 names all of document 4 of part-0, and --spans takes spans"
    ):
        make_plan(corpus, output, lists=[listed], spans=True)
    for what, named, message in (
        ("steps", "30", "give run and steps"), ("steps", f"{root}:x", "is not a step"),
        ("steps", f"{root}:99", "was not recorded"), ("positions", f"{root}:9-8", "give the first and the last one"),
        ("positions", f"{root}:0-99999999", "more than 10,000,000"), ("incidents", f"{root}", "give run and number"),
        ("incidents", f"{root}:x", "give run and number"),
        ("incidents", f"{root}:7", "there is no incident 7; those of this run: 1. Of a spike without an incident"),
        ("incidents", f"{tmp_path}:1", "not the directory of a run"),
        ("incidents", f"{harmless}:1", r"no document of .* is named"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            make_plan(corpus, output, **{what: [named]})  # type: ignore[arg-type]
    write_corpus(tmp_path / "other", tokens=2000, seed=3)
    with pytest.raises(DataError, match="did not train on this corpus"):
        make_plan(tmp_path / "other", output, incidents=[f"{root}:1"])
    note(RunDirectory(root), 5000.0, "order_changed", old="a", new="b")
    with pytest.raises(DataError, match="order_changed"):
        make_plan(corpus, output, steps=[f"{root}:30"])
    with pytest.raises(DataError, match="the order of its data changed after incident 1"):
        make_plan(corpus, output, incidents=[f"{root}:1"])
    assert not output.exists()


def test_make_plan_takes_the_findings_of_a_scan(tmp_path: Path) -> None:
    """Those that are asked for, of this very corpus."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 300, 200).tolist()
    walks = [(random.integers(250) + random.integers(-3, 4, length).cumsum()) % 249 + 1 for length in lengths]
    usual = [[([*walk.tolist(), 0], 0)] for walk in walks]
    shards = [Plain("a", [*usual, [([7] * 400, 0)], usual[3]]), Plain("b", usual[:5])]
    folder, output, scan = tmp_path / "corpus", tmp_path / "plan.txt", tmp_path / "scan"
    corpus(folder, shards, {"train": [("a", 0, 202), ("b", 0, 5)]}, "uint16")
    worst = max(row.score for row in scan_shards(open_shelf([folder]), scan, progress=False).worst)
    copies = {("a", 201), *(("b", n) for n in range(5))}
    given_ = {"scan": scan, "duplicates": True, "overwrite": True}
    found, _ = make_plan(folder, output, **given_)  # type: ignore[arg-type]
    assert {(r.shard, r.document) for r in found} == copies
    found, _ = make_plan(folder, output, **given_, score=worst)  # type: ignore[arg-type]
    assert {(r.shard, r.document) for r in found} == {*copies, ("a", 200)}
    assert [r.tokens for r in found if r.document == 200] == [400]
    # The loop is odd from end to end; a copy goes as a whole, also with --spans.
    found, _ = make_plan(folder, output, **given_, score=worst, spans=True)  # type: ignore[arg-type]
    assert {(r.shard, r.document) for r in found} == {*copies, ("a", 200)}
    assert all(r.span is None for r in found if r.document != 200)
    assert sum(r.tokens for r in found if (r.shard, r.document) == ("a", 200)) > 350
    with pytest.raises(DataError, match="none of its findings are selected"):
        make_plan(folder, output, scan=scan, overwrite=True)
    Manifest.load_manifest(folder).model_copy(update={"name": "other"}).save_manifest(folder)
    with pytest.raises(DataError, match="is the scan of another corpus"):
        make_plan(folder, output, **given_)  # type: ignore[arg-type]
