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
from megastable.data.skip_ledger import SkipEntry
from megastable.run.events.data_events import SkipsAdded, SkipsRead
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.consumption import document_sheet, run_sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.samples import incident_sheet, step_sheet
from megastable_tools.forensics.shard_set import open_shelf
from megastable_tools.forensics.skip import skip_documents
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
    return [p for done in history.list_steps(1, LAST_STEP) for p in history.positions_of(done).tolist()]


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
def test_history_knows_the_positions_of_every_step(run: tuple[Path, list[list[int]]]) -> None:
    root, read = run
    history = History(root)
    done = history.list_steps(1, LAST_STEP)
    assert [d.step for d in done] == [*range(1, 11), *range(6, 31)]
    assert [history.positions_of(d).tolist() for d in done] == read
    assert [d.undone for d in done] == [5 < i < 11 and n < 10 for n, i in enumerate(d.step for d in done)]
    assert (history.step, history.cursor) == (30, done[-1].next_position)
    for step in (1, 6, 29):
        assert [d.step for d in history.require_steps(step, step)] == [step] * (2 if step == 6 else 1)
    with pytest.raises(DataError, match="step 31 was not recorded"):
        history.require_steps(31, 31)
    long = replace(
        history.list_steps(1, 1)[0], first_position=5, next_position=10**13, skipped=[7, 10**13 - 1]
    )
    assert history.positions_of(long).tolist() == [5, 6, 10**13 - 1]  # whole epochs are not enumerated


@pytest.mark.slow
def test_step_sheet_holds_the_very_tokens(run: tuple[Path, list[list[int]]]) -> None:
    """Each row's tokens, read from the .bin at the bytes that it names, are what the order gives at the position."""
    root, _ = run
    history = History(root)
    sheet = step_sheet(history, 6, 7, texts=5)
    assert {row["state"] for row in sheet.rows} == {"trained", "undone"}
    raw = (root.parent / "corpus/part-0.bin").read_bytes()
    source = history.library_at().source
    samples: dict[tuple[Any, ...], list[int]] = {}
    for row in sheet.rows:
        key = row["position"], row["step"], row["state"]
        part = np.frombuffer(raw[row["first_byte"] :][: row["bytes"]], "<u2").tolist()
        samples.setdefault(key, []).extend(part)
    for (position, *_), tokens in samples.items():
        assert source.read_sample(position)[:-1].tolist() == tokens
    assert len(samples) > 20 and sorted(sheet.passages) == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_document_sheet_lists_every_step_that_read_a_document(run: tuple[Path, list[list[int]]]) -> None:
    root, read = run
    history = History(root)
    shelf = open_shelf([root.parent / "corpus/part-0"])
    order = history.library_at().source.order
    steps = [d.step for d in history.list_steps(1, LAST_STEP)]
    for document in (0, 5, 90):
        first, end = Shard(root.parent / "corpus/part-0").document_bounds(document)
        expected = [
            (step, p)
            for step, positions in zip(steps, read, strict=True)
            for p in positions
            if (at := order.locate_sample(p).first_token) < end and at + LENGTH > first
        ]
        sheet = document_sheet(shelf, "part-0", document, [history])
        found = [(r["step"], r["position"]) for r in sheet.rows if r["state"] in ("trained", "undone")]
        assert found == expected
    assert not any(row["state"] == "ahead" for row in sheet.rows)  # it is over
    with pytest.raises(DataError, match="has the documents 0 to"):
        document_sheet(shelf, "part-0", 10**6, [])
    write_corpus(root.parent / "other", tokens=9_000)
    with pytest.raises(DataError, match=r"part-0\.bin is not the run.s training data, which was .*corpus"):
        document_sheet(open_shelf([root.parent / "other/part-0"]), "part-0", 3, [history])


@pytest.mark.slow
def test_skip_documents_reaches_a_run_at_work_and_skips_no_others(run: tuple[Path, list[list[int]]]) -> None:
    """From the step after the one in which they were added: every sample to come that holds a token of them."""
    root, read = run
    live, taken_up, samples = json.loads((root.parent / "told").read_text())
    assert live and taken_up in (9, 10) and samples > 0
    history = History(root)
    order, shard = history.library_at().source.order, Shard(root.parent / "corpus/part-0")
    bounds = [shard.document_bounds(d) for d in DOCUMENTS.tolist()]

    def bad(position: int) -> bool:
        at = order.locate_sample(position).first_token
        return any(at < end and at + LENGTH > first for first, end in bounds)

    late = [
        p
        for d, positions in zip(history.list_steps(1, LAST_STEP), read, strict=True)
        for p in positions
        if d.step > taken_up
    ]
    begin = max(p for positions in read[: 10 + taken_up - 5] for p in positions) + 1
    left_out = set(range(begin, history.cursor)) - {*late[-(len(late)) :]} - {*range(60, 70), *range(27, 30)}
    assert left_out == {p for p in range(begin, history.cursor) if bad(p)} and left_out
    events = list(history.run.iterate_events(SkipsAdded, SkipsRead))
    assert [e["event"] for e in events] == ["skips_read", "skips_added", "skips_read"]


@pytest.mark.slow
def test_run_sheet_counts_what_was_read(run: tuple[Path, list[list[int]]]) -> None:
    """Not what was undone; and what was read before it came on the ledger was read."""
    root, read = run
    (row,) = run_sheet(History(root)).rows
    history = History(root)
    skips = history.select_from(history.library_at())
    trained = [p for positions in read[:5] + read[10:] for p in positions]
    assert row["samples"] == len(trained) and skips.mask_skipped(np.array(trained)).any()
    assert row["skipped"] == history.cursor - len(trained)
    assert row["tokens"] == LENGTH * row["samples"] and row["share"] == 1.0


def test_incident_sheet_begins_with_the_bad_samples(corpus: Path, tmp_path: Path) -> None:
    incident = data_incident(corpus, [(233, 236), (400, 401)])
    history = History(make_run(corpus, tmp_path / "run", incident))
    sheet = incident_sheet(history, 1, texts=2)
    found_bad = [row["bad"] for row in sheet.rows]
    assert found_bad == sorted(found_bad, reverse=True)
    assert {r["position"] for r in sheet.rows if r["bad"]} == {233, 234, 235, 400}
    assert {r["position"] for r in sheet.rows if not r["bad"]} == {*range(232, 248)} - {233, 234, 235}
    assert {r["state"] for r in sheet.rows if r["position"] == 400} == {"unread"}
    named = {(d["shard"], d["document"]) for d in incident.documents}
    assert {(r["shard"], r["document"]) for r in sheet.rows if r["bad"]} == named
    facts = dict(run_sheet(history).facts)
    assert facts["steps lost"] == facts["updates refused"] == "2" == str(incident.steps_lost)
    with pytest.raises(DataError, match="there is no incident 7; those of this run: 1"):
        incident_sheet(history, 7, texts=0)


def test_incident_sheet_shows_what_is_deferred_behind_what_is_skipped(corpus: Path, tmp_path: Path) -> None:
    incident = data_incident(corpus, [(233, 236)]).model_copy(
        update={"deferred": [(240, 243)], "returns": [(600, 603)]}
    )
    rows = incident_sheet(History(make_run(corpus, tmp_path / "run", incident)), 1, texts=0).rows
    assert {r["position"] for r in rows[:3]} == {233, 234, 235} and all(r["bad"] for r in rows[:3])
    assert {r["position"] for r in rows[3:6]} == {240, 241, 242} and all(r["deferred"] for r in rows[3:6])


@pytest.mark.slow
def test_skip_documents_of_a_run_that_is_down_holds_from_its_checkpoint_on(
    run: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """It goes back to that, and reads again what its records say it has read."""
    shutil.copytree(run[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-30")
    states = list((tmp_path / "run/checkpoints").glob("step-*/state.json"))
    back = min(json.loads(path.read_text())["cursor"] for path in states)
    history = History(tmp_path / "run")
    order = history.library_at().source.order
    assert back < history.cursor
    shard = Shard(run[0].parent / "corpus/part-0")
    position = back + 3
    document = shard.document_of(order.locate_sample(position).first_token + 1)
    skip_documents(
        history, history.blends[-1].corpora[0].fingerprint, {"part-0": np.array([document])}, "bad"
    )
    assert (
        History(tmp_path / "run").select_from(history.library_at()).mask_skipped(np.array([position])).all()
    )


def test_history_of_a_run_that_began_again_or_changed_its_order(corpus: Path, tmp_path: Path) -> None:
    history = History(make_run(corpus, tmp_path / "run"))
    rows = history.list_steps(1, LAST_STEP)
    assert not any(done.undone for done in rows)
    note(history.run, rows[-1].time + 1, "training", step=4, cursor=32)
    again = History(tmp_path / "run").list_steps(1, LAST_STEP)
    assert [done.step for done in again if done.undone] == [done.step for done in rows if done.step > 4]
    note(history.run, rows[-1].time + 2, "order_changed", old="x", new="y")
    changed = History(tmp_path / "run")
    with pytest.raises(DataError, match='"order_changed"'):
        step_sheet(changed, 3, 3, texts=0)
    assert not changed.find_steps_that_read(np.arange(100)) and "order_changed" in changed.problems[0]


def test_history_refuses_no_run_and_passes_over_damaged_records(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="not the directory of a run"):
        History(tmp_path)
    run = make_run(corpus, tmp_path / "run")
    note(History(run).run, 1e9, "resumed", step="x")  # an event that says nothing
    (run / "steps" / "00000001-00000020-5.parquet").write_bytes(b"torn")
    history = History(run)
    (run / "steps" / "by hand.parquet").write_bytes(b"torn")
    (run / "steps" / "00000021-00000900-9999999999999.parquet").write_bytes(b"torn")
    assert history.step == History(run).step > 0  # by the newest that can be read
    assert history.list_steps(1, 3) and any(
        "00000001-00000020-5.parquet is damaged" in p for p in history.problems
    )
