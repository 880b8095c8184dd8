"""What is told of samples that were read, undone, put off and read again: by the order of each time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megastable.config.tree import RunConfig
from megastable.data.shards import Shard
from megastable.report.postmortem.evidence import Gatherer, Run
from megastable.report.postmortem.sample_texts import SHOWN
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.consumption import run_sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.samples import incident_sheet, step_sheet
from megastable_tools.forensics.shard_set import open_shelf
from megastable_tools.forensics.whereabouts import document_sheet
from tests.conftest import LENGTH, write_corpus
from tests.distributed import run_ranks
from tests.recovery.test_recovery import incidents, recipe, spoil

Sample = tuple[int, ...]  # its tokens


def spoil_watched(config: RunConfig, log: Path) -> dict[str, Any]:
    """Weights that are spoilt in step 32, and the tokens of every sample of every step, as the engine got them."""
    from megastable.engine.engine import Engine
    from megastable.recovery import replay_trials

    # Too few steps are left to compare two branches by, as at the end of a run: without a trial the window is deferred.
    replay_trials.LEAST = config.train.steps
    real = Engine.train_step

    def step(self: Engine, micro_batches: Any, *args: Any) -> Any:
        rows = [
            [p, *t]
            for m in micro_batches
            for p, t in zip(m.positions.tolist(), m.tokens.tolist(), strict=True)
        ]
        if not self._probing:  # a measurement is no step
            with log.open("a") as file:
                file.write(json.dumps(sorted(rows)) + "\n")
        return real(self, micro_batches, *args)

    Engine.train_step = step  # type: ignore[method-assign, assignment]
    try:
        return spoil(config, "weights", [32])
    finally:
        Engine.train_step = real  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[tuple[int, Sample]]]]:
    """A run that puts off a window, and what each of its steps really read: position and tokens."""
    root = tmp_path_factory.mktemp("deferred")
    write_corpus(root / "corpus", ids=20)
    policy = {"policy": {"recur_steps": 12, "verify_steps": 6}}
    config = recipe(root / "corpus", root / "run", stability=policy)
    (end,) = run_ranks(1, spoil_watched, config, root / "log")
    told = {"config": config.model_dump(mode="json"), "manifests": []}
    (root / "run/recipe.yaml").write_text(yaml.safe_dump(told))  # which `spoil` does not do
    assert end["code"] == 0 and incidents(root / "run")[0]["deferred"]
    lines = map(json.loads, (root / "log").read_text().splitlines())
    return root / "run", [[(position, tuple(tokens)) for position, *tokens in line] for line in lines]


def test_every_step_that_read_a_document(run: tuple[Path, list[list[tuple[int, Sample]]]]) -> None:
    """Before the window was put off, and after it: at the places of each time, and with the tokens of each place."""
    root, read = run
    history = History(root)
    done = history.steps(1, LAST_STEP)
    assert [history.positions(d).tolist() for d in done] == [[p for p, _ in step] for step in read]
    again = [p for a, b in incidents(root)[0]["returns"] for p in range(a, b)]
    tokens = {(d.step, d.state, p): t for d, step in zip(done, read, strict=True) for p, t in step}
    shard = Shard(root.parent / "corpus/part-0")
    order = history.library().source.order
    firsts = order.locate(again).first_token
    starts = np.array([shard.document_bounds(d)[0] for d in range(shard.documents)])
    documents = np.unique(np.searchsorted(starts, firsts, side="right") - 1).tolist()
    shelf = open_shelf([root.parent / "corpus/part-0"])
    met = Counter[str]()
    for document in documents[:6]:
        first, end = shard.document_bounds(document)
        text = shard.read(first, end - first).tolist()
        sheet = document_sheet(shelf, "part-0", document, [history])
        for row in sheet.rows[1:]:
            assert row["state"] in ("trained", "undone", "refused")
            sample = tokens[row["step"], row["state"], row["position"]]
            part = text[row["first_token"] :][: row["tokens"]]
            assert "".join(map(chr, part)) in "".join(map(chr, sample)), row
            met[row["state"]] += row["position"] in again
        both = (
            {r["position"] for r in sheet.rows[1:] if r["state"] in ("undone", "refused")},
            {r["position"] for r in sheet.rows[1:] if r["state"] == "trained"},
        )
        assert both[0] - both[1], "it was read where something else stands by now"
    assert met["trained"] >= 6


def test_the_sheet_of_a_step_that_was_undone(run: tuple[Path, list[list[tuple[int, Sample]]]]) -> None:
    root, read = run
    history = History(root)
    (number, done), *_ = [(n, d) for n, d in enumerate(history.steps(1, LAST_STEP)) if d.undone]
    sheet = step_sheet(history, done.step, done.step, texts=0)
    raw = np.fromfile(root.parent / "corpus/part-0.bin", "<u2")
    for position, tokens in read[number]:
        (first,) = [
            r["first_byte"] for r in sheet.rows
            if (r["position"], r["state"], r["step"]) == (position, done.state, done.step)
        ][:1]  # fmt: skip
        assert tuple(raw[first // 2 :][: len(tokens)].tolist()) == tokens


def test_the_sheet_and_the_post_mortem_of_the_incident_show_what_was_put_off(
    run: tuple[Path, list[list[tuple[int, Sample]]]],
) -> None:
    root, read = run
    history, (incident,) = History(root), incidents(root)
    put_off = [p for a, b in incident["deferred"] for p in range(a, b)]
    before = {
        p: t for d, step in zip(history.steps(1, LAST_STEP), read, strict=True) if d.undone for p, t in step
    }
    sheet = incident_sheet(history, 1, texts=0)
    shown = {r["position"] for r in sheet.rows if r["deferred"]}
    assert shown == set(put_off) and f"{len(put_off)} samples deferred" in " ".join(sheet.lead)
    raw = np.fromfile(root.parent / "corpus/part-0.bin", "<u2")
    for position in put_off:
        first = next(r["first_byte"] for r in sheet.rows if r["position"] == position)
        assert tuple(raw[first // 2 :][:LENGTH].tolist()) == before[position]
    case = Gatherer(Run(root), 1).gather()
    texts = Run(root).samples.library(0.0)
    put_off = put_off[:SHOWN]
    assert [s.position for s in case.samples] == put_off
    assert all("tokenizer.model cannot be read" in told for told in case.problems), "this corpus has none"
    for sample in case.samples:
        ends = [i for i, t in enumerate(before[sample.position]) if t == texts.source.eod]
        parts = np.split(np.array(before[sample.position]), [i + 1 for i in ends])
        told = [
            texts.text([t for t in part.tolist() if t != texts.source.eod]) for part in parts if part.size
        ]
        assert [piece.text for piece in sample.pieces] == told


def test_what_was_read_so_far_counts_a_sample_that_was_put_off_once(
    run: tuple[Path, list[list[tuple[int, Sample]]]],
) -> None:
    root, _ = run
    (row,) = run_sheet(History(root)).rows
    assert (row["samples"], row["skipped"]) == (8 * 50, 0)
