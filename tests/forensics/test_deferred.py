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
from megastable.run.record_files import LAST_STEP
from megastable_tools.forensics.consumption import document_sheet
from megastable_tools.forensics.history import History
from megastable_tools.forensics.shard_set import open_shelf
from tests.conftest import write_corpus
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


def test_document_sheet_lists_every_step_at_the_places_of_its_time(
    run: tuple[Path, list[list[tuple[int, Sample]]]],
) -> None:
    """Before the window was put off, and after it: at the places of each time, and with the tokens of each place."""
    root, read = run
    history = History(root)
    done = history.list_steps(1, LAST_STEP)
    assert [history.positions_of(d).tolist() for d in done] == [[p for p, _ in step] for step in read]
    again = [p for a, b in incidents(root)[0]["returns"] for p in range(a, b)]
    tokens = {(d.step, d.state, p): t for d, step in zip(done, read, strict=True) for p, t in step}
    shard = Shard(root.parent / "corpus/part-0")
    order = history.library_at().source.order
    firsts = order.locate_samples(again).first_token
    starts = np.array([shard.document_bounds(d)[0] for d in range(shard.documents)])
    documents = np.unique(np.searchsorted(starts, firsts, side="right") - 1).tolist()
    shelf = open_shelf([root.parent / "corpus/part-0"])
    met = Counter[str]()
    for document in documents[:6]:
        first, end = shard.document_bounds(document)
        text = shard.read_tokens(first, end - first).tolist()
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
