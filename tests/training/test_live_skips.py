"""Lines that somebody adds to the ledgers of a run: what becomes of them while it trains, and when it goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.config.tree import RunConfig
from megastable.data.blends import read_blends
from megastable.data.order import BLOCK
from megastable.data.skip_ledger import SkipEntry
from megastable.run import records
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks, train
from tests.journal import events


def small(corpus: Path, run: Path, steps: int, **parts: Any) -> RunConfig:
    """What is trained on counts here, not what is learnt of it."""
    return tiny(corpus, run, train={"steps": steps, "micro_batch": 4}, model={"layers": 1}, **parts)


def train_and_skip(config: RunConfig, lines: list[tuple[int, str]]) -> int:
    """Train; in the middle of the steps named, another thread adds a line to the ledger, as another process would."""
    import torch.distributed as dist

    from megastable.engine.engine import Engine
    from megastable.train import train

    real, wanted = Engine.train_step, dict(lines)

    def step(self: Engine, *args: Any) -> Any:
        import time

        count = step.count = step.count + 1  # type: ignore[attr-defined]
        if count in wanted and dist.get_rank() == 0:
            assert config.run.dir is not None
            with (config.run.dir / "skips.jsonl").open("a") as file:
                file.write(wanted[count] + "\n")
            time.sleep(0.6)  # longer than two looks of the heartbeat
        return real(self, *args)

    step.count = 0  # type: ignore[attr-defined]
    Engine.train_step = step  # type: ignore[method-assign, assignment]
    try:
        return train(config, Path("recipe.yaml"))
    finally:
        Engine.train_step = real  # type: ignore[method-assign]


def line(first: int, end: int) -> str:
    return SkipEntry(first=first, end=end, reason="bad").model_dump_json(exclude_none=True)


NO_NUMBER = json.dumps({"first": 5, "end": 6, "reason": "bad", "incident": 10**30})
OUT = SkipEntry(first=9, end=10, reason="bad", corpus="nowhere").model_dump_json(exclude_none=True)


def positions(run: Path) -> dict[int, list[int]]:
    """What every step trained on, by its record."""
    found = {}
    for row in records.read_newest_records(run / "steps").to_pylist():
        out = {p for a, b in zip(row["skipped"][::2], row["skipped"][1::2], strict=True) for p in range(a, b)}
        found[row["step"]] = [p for p in range(row["first_position"], row["next_position"]) if p not in out]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_live_run_leaves_out_what_is_added_from_the_next_step_on(
    world: int, corpus: Path, tmp_path: Path
) -> None:
    config = small(corpus, tmp_path / "run", steps=12)
    # In step 3, positions of 4 (skipped in part), of 5 (whole) and far ahead; then what is no line, then more.
    lines = [(3, line(27, 30) + "\n" + line(34, 44)), (6, "{not a line\n" + NO_NUMBER)]
    lines += [(8, line(100, 101) + "\n" + OUT + "\n" + line(60, 2**62))]
    assert run_ranks(world, train_and_skip, config, lines) == [0] * world
    trained = positions(tmp_path / "run")
    kept = [p for p in range(200) if p not in {*range(27, 30), *range(34, 44), 100}]
    assert [trained[step] for step in range(1, 13)] == [kept[8 * i : 8 * i + 8] for i in range(12)]
    read, again = events(tmp_path / "run", "skips_read")
    assert (read["step"], read["cursor"], read["entries"]) == (3, 24, 2)
    assert (again["step"], again["entries"]) == (8, 1)
    # What somebody got wrong ends no run: the other lines hold.
    refused = events(tmp_path / "run", "skips_refused")
    assert [e["step"] for e in refused] == [6, 6, 8, 8, 8, 8]
    said = ["line 3 is not JSON", "line 4: incident"]
    said += [*said, "no corpus 'nowhere'", "every position after some point is named"]
    assert all(text in event["problem"] for text, event in zip(said, refused, strict=True))


@pytest.mark.slow
def test_a_new_blend_begins_at_the_next_block_and_is_journaled(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for seed, path in enumerate(paths):
        write_corpus(path, tokens=300_000, seed=seed)

    def config(steps: int, weights: tuple[float, float], **more: Any) -> RunConfig:
        given = [{"path": str(p), "weight": w} for p, w in zip(paths, weights, strict=True) if w]
        # A look over the edge of the block without 500 steps.
        data = {"corpora": given, "skip": [[88, BLOCK - 16]], **more}
        return small(paths[0], tmp_path / "run", data=data, steps=steps, checkpoint={"interval": 5})

    run_ranks(1, train, config(10, (0.5, 0.5)))
    run_ranks(2, train, config(15, (0.25, 0.75)))
    first, second = read_blends(tmp_path / "run" / "blends.jsonl")
    assert (first.position, second.position, second.step) == (0, BLOCK, 10)
    (changed,) = events(tmp_path / "run", "blend_changed")
    assert changed["old"] == {"a": 0.5, "b": 0.5} and changed["new"] == {"a": 0.25, "b": 0.75}
    # Taken out altogether; the order of the other goes on, and nothing is said of a changed corpus.
    run_ranks(1, train, config(20, (0.0, 1.0)))
    assert not events(tmp_path / "run", "order_changed")
    assert read_blends(tmp_path / "run" / "blends.jsonl")[-1].position == 2 * BLOCK
    trained = positions(tmp_path / "run")
    assert sorted(trained) == list(range(1, 21))
    flat = [p for step in range(1, 21) for p in trained[step]]
    assert np.all(np.diff(flat) > 0) and flat[-1] > BLOCK


def test_a_changed_corpus_is_still_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", tokens=40_000)
    config = small(tmp_path / "a", tmp_path / "run", steps=5, checkpoint={"interval": 5})
    run_ranks(1, train, config)
    write_corpus(tmp_path / "a", tokens=40_000, seed=9)
    more = small(tmp_path / "a", tmp_path / "run", steps=6, checkpoint={"interval": 5})
    with pytest.raises(AssertionError, match=re.escape("positions mean other samples now")):
        run_ranks(1, train, more)
    data = {"corpora": [{"path": tmp_path / "a"}], "accept_changed_manifest": True}
    assert run_ranks(1, train, small(tmp_path / "a", tmp_path / "run", data=data, steps=6)) == [0]
    assert [e.position for e in read_blends(tmp_path / "run" / "blends.jsonl")] == [0, 0]


@pytest.mark.slow
def test_the_detector_is_told_where_a_person_changes_the_mix(tmp_path: Path) -> None:
    """A corpus swapped out of a live run, and weights that begin at a block: neither may pass for an incident."""
    paths = [tmp_path / name for name in ("a", "b")]
    for seed, path in enumerate(paths):
        write_corpus(path, tokens=300_000, seed=seed)

    def config(steps: int, weights: tuple[float, float]) -> RunConfig:
        given = [{"path": str(p), "weight": w} for p, w in zip(paths, weights, strict=True) if w]
        data = {"corpora": given, "skip": [[120, BLOCK - 16]]}
        return small(paths[0], tmp_path / "run", data=data, steps=steps, checkpoint={"interval": 5})

    out = SkipEntry(first=0, end=2**62, reason="x", corpus="b").model_dump_json(exclude_none=True)
    run_ranks(2, train_and_skip, config(10, (0.5, 0.5)), [(4, out)])
    (changed,) = events(tmp_path / "run", "mix_changed")
    assert changed["step"] == 5 and changed["old"] == {"a": 0.5, "b": 0.5} and changed["new"] == {"a": 1.0}
    (tmp_path / "run/skips.jsonl").write_text("")  # a person takes that back
    run_ranks(1, train, config(20, (0.25, 0.75)))
    steps = events(tmp_path / "run", "mix_changed")[1:]
    assert [e["new"] for e in steps] == [{"a": 0.5, "b": 0.5}, {"a": 0.25, "b": 0.75}]
    first, second = (e["step"] for e in steps)
    rows = {r["step"]: r for r in records.read_newest_records(tmp_path / "run/steps").to_pylist()}
    assert first == 11 and rows[second]["next_position"] > BLOCK >= rows[second - 1]["next_position"]


@pytest.mark.slow
def test_a_supervisors_restart_lives_with_a_line_that_a_person_got_wrong(
    corpus: Path, tmp_path: Path
) -> None:
    """At night nobody mends it; a person who starts the run sees it."""
    run_ranks(1, train, small(corpus, tmp_path / "run", steps=2))
    (tmp_path / "run/skips.jsonl").write_text(line(16, 18) + "\n{not a line\n")
    longer = small(corpus, tmp_path / "run", steps=3)
    with pytest.raises(AssertionError, match=re.escape("line 2 is not JSON")):
        run_ranks(1, train, longer)
    with pytest.raises(AssertionError, match=re.escape("line 2 is not JSON")):
        run_ranks(1, train_attempt, longer, 1)
    assert run_ranks(1, train_attempt, longer, 2) == [0]
    assert positions(tmp_path / "run")[3] == [*range(18, 26)]


def train_attempt(config: RunConfig, attempt: int) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"), attempt)
