"""Which samples a step trained on, told from the run directory alone, against what the training really read."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.base.errors import DataError
from megastable.config.tree import RunConfig
from megastable.data.shards import Shard
from megastable.data.skip_ledger import SkipEntry, read_ledger
from megastable.run.events.data_events import SkipsAdded, SkipsRead
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.consumption import run_sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.samples import incident_sheet, step_sheet
from megastable_tools.forensics.shard_set import open_shelf
from megastable_tools.forensics.skip import skip_documents, swap_out
from megastable_tools.forensics.whereabouts import document_sheet
from tests.conftest import LENGTH, tiny, write_corpus
from tests.distributed import run_ranks
from tests.report.runs import data_incident, make_run, note

DOCUMENTS = np.array([3, 17, 200])


def train_watched(config: RunConfig, log: Path, more: dict[int, str]) -> int:
    """Train on one rank and write down which positions every step really read; in the middle of the steps named, add a
    line to the ledger, or skip documents."""
    from megastable.engine.engine import Engine
    from megastable.train import train

    real, waiting = Engine.train_step, []
    count = 0

    def step(self: Engine, micro_batches: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        read = sorted(p for m in micro_batches for p in m.positions.tolist())
        with log.open("a") as file:
            file.write(json.dumps(read) + "\n")
        assert config.run.dir is not None
        if wanted := more.get(count):
            if wanted == "documents":
                waiting.append(threading.Thread(target=skip, args=(config.run.dir, log.with_name("told"))))
                waiting[-1].start()
            else:
                with (config.run.dir / "skips.jsonl").open("a") as file:
                    file.write(wanted + "\n")
            time.sleep(0.8)  # longer than two looks of the heartbeat
        return real(self, micro_batches, *args)

    Engine.train_step = step  # type: ignore[method-assign, assignment]
    try:
        code = train(config, Path("recipe.yaml"))
    finally:
        Engine.train_step = real  # type: ignore[method-assign]
    for thread in waiting:
        thread.join()
    return code


def skip(run: Path, told: Path) -> None:
    history = History(run)
    done = skip_documents(history, history.blends[-1].corpora[0].fingerprint, {"part-0": DOCUMENTS}, "bad")
    told.write_text(json.dumps([done.live, done.taken_up, done.samples]))


def positions_of(root: Path) -> list[int]:
    """What a run trained on, in the order of time."""
    history = History(root)
    return [p for done in history.steps(1, LAST_STEP) for p in history.positions(done).tolist()]


def events_of(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "journal.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Ten steps of 8 samples with skips that come in the middle; back to step 5, on with 16 samples a step, a part of
    them done again; then documents skipped while it trains. And what it really read."""
    root = tmp_path_factory.mktemp("history")
    write_corpus(root / "corpus")
    log = root / "log"

    def config(steps: int, batch: int, **more: Any) -> RunConfig:
        sizes = {"steps": steps, "global_batch": batch, "micro_batch": 4}
        logging = {"trackers": [], "flush_steps": 3, "norms_interval": 0}
        given = {"train": sizes, "checkpoint": {"interval": 5}, "logging": logging} | more
        return tiny(root / "corpus", root / "run", **given)

    line = SkipEntry(first=27, end=30, reason="bad").model_dump_json(exclude_none=True)
    assert run_ranks(1, train_watched, config(10, 8), log, {3: line}) == [0]
    shutil.rmtree(root / "run/checkpoints/step-10")
    data = {"corpora": [{"path": root / "corpus"}], "skip": [[60, 70]]}
    assert run_ranks(1, train_watched, config(30, 16, data=data), log, {4: "documents"}) == [0]
    return root / "run", [json.loads(x) for x in log.read_text().splitlines()]


@pytest.mark.slow
def test_the_positions_of_every_step(run: tuple[Path, list[list[int]]]) -> None:
    root, read = run
    history = History(root)
    done = history.steps(1, LAST_STEP)
    assert [d.step for d in done] == [*range(1, 11), *range(6, 31)]
    assert [history.positions(d).tolist() for d in done] == read
    assert [d.undone for d in done] == [5 < i < 11 and n < 10 for n, i in enumerate(d.step for d in done)]
    assert (history.step, history.cursor) == (30, done[-1].next_position)
    for step in (1, 6, 29):
        assert [d.step for d in history.at(step, step)] == [step] * (2 if step == 6 else 1)
    with pytest.raises(DataError, match="step 31 was not recorded"):
        history.at(31, 31)


@pytest.mark.slow
def test_the_sheet_of_a_step_holds_its_very_tokens(run: tuple[Path, list[list[int]]]) -> None:
    """Each row's tokens, read from the .bin at the bytes that it names, are what the order gives at the position."""
    root, _ = run
    history = History(root)
    sheet = step_sheet(history, 6, 7, texts=5)
    assert {row["step"] for row in sheet.rows} == {6, 7} and {row["state"] for row in sheet.rows} == {
        "trained",
        "undone",
    }
    raw = (root.parent / "corpus/part-0.bin").read_bytes()
    source = history.library().source
    samples: dict[tuple[Any, ...], list[int]] = {}
    for row in sheet.rows:
        key = row["position"], row["step"], row["state"]
        part = np.frombuffer(raw[row["first_byte"] :][: row["bytes"]], "<u2").tolist()
        samples.setdefault(key, []).extend(part)
    for (position, *_), tokens in samples.items():
        assert source.sample(position)[:-1].tolist() == tokens
    assert len(samples) > 20 and sorted(sheet.passages) == [0, 1, 2, 3, 4]
    assert all(row["tokens"] <= row["of_tokens"] for row in sheet.rows)


@pytest.mark.slow
def test_every_step_that_read_a_document(run: tuple[Path, list[list[int]]]) -> None:
    root, read = run
    history = History(root)
    shelf = open_shelf([root.parent / "corpus/part-0"])
    order = history.library().source.order
    steps = [d.step for d in history.steps(1, LAST_STEP)]
    for document in (0, 5, 90):
        first, end = Shard(root.parent / "corpus/part-0").document_bounds(document)
        expected = [
            (step, p)
            for step, positions in zip(steps, read, strict=True)
            for p in positions
            if (at := order.locate_one(p).first_token) < end and at + LENGTH > first
        ]
        sheet = document_sheet(shelf, "part-0", document, [history])
        found = [(r["step"], r["position"]) for r in sheet.rows if r["state"] in ("trained", "undone")]
        assert found == expected
    assert not any(row["state"] == "ahead" for row in sheet.rows)  # it is over
    with pytest.raises(DataError, match="has the documents 0 to"):
        document_sheet(shelf, "part-0", 10**6, [])


@pytest.mark.slow
def test_documents_are_skipped_while_it_trains_and_no_others(run: tuple[Path, list[list[int]]]) -> None:
    """From the step after the one in which they were added: every sample to come that holds a token of them."""
    root, read = run
    live, taken_up, samples = json.loads((root.parent / "told").read_text())
    assert live and taken_up in (9, 10) and samples > 0
    history = History(root)
    order, shard = history.library().source.order, Shard(root.parent / "corpus/part-0")
    bounds = [shard.document_bounds(d) for d in DOCUMENTS.tolist()]

    def bad(position: int) -> bool:
        at = order.locate_one(position).first_token
        return any(at < end and at + LENGTH > first for first, end in bounds)

    late = [
        p
        for d, positions in zip(history.steps(1, LAST_STEP), read, strict=True)
        for p in positions
        if d.step > taken_up
    ]
    begin = max(p for positions in read[: 10 + taken_up - 5] for p in positions) + 1
    left_out = set(range(begin, history.cursor)) - {*late[-(len(late)) :]} - {*range(60, 70), *range(27, 30)}
    assert left_out == {p for p in range(begin, history.cursor) if bad(p)} and left_out
    events = list(history.run.events(SkipsAdded, SkipsRead))
    assert [e["event"] for e in events] == ["skips_read", "skips_added", "skips_read"]


@pytest.mark.slow
def test_what_was_read_so_far(run: tuple[Path, list[list[int]]]) -> None:
    """Not what was undone; and what was read before it came on the ledger was read."""
    root, read = run
    (row,) = run_sheet(History(root)).rows
    history = History(root)
    skips = history.selection(history.library())
    trained = [p for positions in read[:5] + read[10:] for p in positions]
    assert row["samples"] == len(trained) and skips.mask(np.array(trained)).any()
    assert row["skipped"] == history.cursor - len(trained)
    assert row["tokens"] == LENGTH * row["samples"] and row["share"] == 1.0


@pytest.mark.slow
def test_a_second_skip_adds_nothing_and_a_corpus_can_go(
    run: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    shutil.copytree(run[0], tmp_path / "run")
    recipe = tmp_path / "run/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 30\n", "steps: 90\n", 1))
    history = History(tmp_path / "run")
    fingerprint = history.blends[-1].corpora[0].fingerprint
    before = len(read_ledger(history.run.skips))
    again = skip_documents(history, fingerprint, {"part-0": DOCUMENTS}, "bad")
    assert not again.live and again.taken_up is None
    once_more = skip_documents(History(tmp_path / "run"), fingerprint, {"part-0": DOCUMENTS}, "bad")
    assert once_more.samples == 0 and once_more.already > 0
    assert len(read_ledger(history.run.skips)) == before + again.lines
    assert once_more.text.startswith("nothing to do")
    told = [event["lines"] for event in history.run.events(SkipsAdded)]
    assert told and 0 not in told  # what was not done is not journaled
    with pytest.raises(DataError, match="does not train on the corpus of the plan"):
        skip_documents(history, "0" * 64, {"part-0": DOCUMENTS}, "bad")
    with pytest.raises(DataError, match="lists no shard 'other'"):
        skip_documents(history, fingerprint, {"other": DOCUMENTS}, "bad")
    with pytest.raises(DataError, match="swaps out every corpus"):
        swap_out(history, "corpus", "bad")


def test_an_incident_begins_with_the_guilty(corpus: Path, tmp_path: Path) -> None:
    incident = data_incident(corpus, [(233, 236), (400, 401)])
    history = History(make_run(corpus, tmp_path / "run", incident))
    sheet = incident_sheet(history, 1, texts=2)
    guilty = [row["guilty"] for row in sheet.rows]
    assert guilty == sorted(guilty, reverse=True)
    assert {r["position"] for r in sheet.rows if r["guilty"]} == {233, 234, 235, 400}
    assert {r["position"] for r in sheet.rows if not r["guilty"]} == {*range(232, 248)} - {233, 234, 235}
    assert {r["state"] for r in sheet.rows if r["position"] == 400} == {"unread"}
    named = {(d["shard"], d["document"]) for d in incident.documents}
    assert {(r["shard"], r["document"]) for r in sheet.rows if r["guilty"]} == named
    assert (
        dict(run_sheet(history).facts)["steps lost"] == "2" == str(incident.steps_lost)
    )  # refused ones, too
    assert dict(run_sheet(history).facts)["updates refused"] == "2"
    with pytest.raises(DataError, match="there is no incident 7; those of this run: 1"):
        incident_sheet(history, 7, texts=0)


@pytest.mark.slow
def test_a_run_that_is_down_leaves_documents_out_from_its_checkpoint_on(
    run: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """It goes back to that, and reads again what its records say it has read."""
    shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-30")
    states = list((tmp_path / "run/checkpoints").glob("step-*/state.json"))
    back = min(json.loads(path.read_text())["cursor"] for path in states)
    history = History(tmp_path / "run")
    order = history.library().source.order
    assert back < history.cursor
    shard = Shard(run[0].parent / "corpus/part-0")
    position = back + 3
    document = shard.document_of(order.locate_one(position).first_token + 1)
    skip_documents(
        history, history.blends[-1].corpora[0].fingerprint, {"part-0": np.array([document])}, "bad"
    )
    assert History(tmp_path / "run").selection(history.library()).mask(np.array([position])).all()


@pytest.mark.slow
def test_a_shard_of_the_same_name_is_not_the_runs(run: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    write_corpus(tmp_path / "other", tokens=9_000)
    with pytest.raises(DataError, match=r"part-0\.bin is not the run.s training data, which was .*corpus"):
        document_sheet(open_shelf([tmp_path / "other/part-0"]), "part-0", 3, [History(run[0])])
    shutil.copytree(run[0].parent / "corpus", tmp_path / "copy")
    assert document_sheet(open_shelf([tmp_path / "copy/part-0"]), "part-0", 3, [History(run[0])]).rows


def test_a_run_that_began_again_without_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    history = History(make_run(corpus, tmp_path / "run"))
    rows = history.steps(1, LAST_STEP)
    assert not any(done.undone for done in rows)
    note(history.run, rows[-1].time + 1, "training", step=4, cursor=32)
    again = History(tmp_path / "run").steps(1, LAST_STEP)
    assert [done.step for done in again if done.undone] == [done.step for done in rows if done.step > 4]
    note(history.run, rows[-1].time + 2, "order_changed", old="x", new="y")
    changed = History(tmp_path / "run")
    with pytest.raises(DataError, match='"order_changed"'):
        step_sheet(changed, 3, 3, texts=0)
    assert not changed.that_read(np.arange(100)) and "order_changed" in changed.problems[0]


@pytest.mark.slow
def test_a_step_that_passed_over_whole_epochs(run: tuple[Path, list[list[int]]]) -> None:
    history = History(run[0])
    done = replace(history.steps(1, 1)[0], first_position=5, next_position=10**13, skipped=[7, 10**13 - 1])
    assert history.positions(done).tolist() == [5, 6, 10**13 - 1]


def test_no_run(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="not the directory of a run"):
        History(tmp_path)
    run = make_run(corpus, tmp_path / "run")
    note(History(run).run, 1e9, "resumed", step="x")  # an event that says nothing
    (run / "steps" / "00000001-00000020-5.parquet").write_bytes(b"torn")
    history = History(run)
    (run / "steps" / "by hand.parquet").write_bytes(b"torn")
    (run / "steps" / "00000021-00000900-9999999999999.parquet").write_bytes(b"torn")
    assert history.step == History(run).step > 0  # by the newest that can be read
    assert history.steps(1, 3) and any(
        "00000001-00000020-5.parquet is damaged" in p for p in history.problems
    )


def test_a_sample_that_no_model_could_read_is_shown(corpus: Path, tmp_path: Path) -> None:
    """An id beyond the vocabulary is what one looks for: the rest of the batch is shown beside it."""
    shutil.copytree(corpus, tmp_path / "corpus")
    root = make_run(tmp_path / "corpus", tmp_path / "run")
    history = History(root)
    place = history.library().source.order.locate_one(history.at(3, 3)[0].first_position)
    with (tmp_path / "corpus/part-0.bin").open("r+b") as file:
        file.seek(2 * (place.first_token + 1))
        file.write(b"\xff\xff")
    sheet = step_sheet(history, 3, 3, texts=100)
    assert "65535" in " ".join(p.text for passages in sheet.passages.values() for p in passages)
