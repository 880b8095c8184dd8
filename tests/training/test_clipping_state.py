"""The state of clipping in checkpoints: resumed bit for bit, under other layouts, begun anew, ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megastable.checkpoint import store
from megastable.checkpoint.whole import WholeState
from megastable.config.tree import RunConfig
from megastable.run import records
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import identical

STOP, END = 3, 6
ADAGC, ZCLIP = {"kind": "adagc", "warmup": 2}, {"kind": "zclip", "warmup": 2, "threshold": 0.5}


def config(corpus: Path, folder: Path, steps: int, clipping: Any, **parts: Any) -> RunConfig:
    batch = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0}
    rate = {"warmup_steps": 2, "total_steps": 20}
    optimizer = {"clipping": clipping}
    return tiny(corpus, folder, train=batch, schedule=rate, optimizer=optimizer, parallel=parts)


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "journal.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("clipping", "zero"), [(ADAGC, 1), (ADAGC, 3), (ZCLIP, 1)])
def test_resumed_bit_for_bit(clipping: dict[str, Any], zero: int, corpus: Path, tmp_path: Path) -> None:
    def at(run: str, steps: int, **parts: Any) -> RunConfig:
        return config(corpus, tmp_path / run, steps, clipping, **parts)

    run_ranks(2, train, at("straight", END, zero=zero), at("stopped", STOP, zero=zero))
    run_ranks(2, train, at("stopped", END, zero=zero))
    straight, stopped = (tmp_path / run / f"checkpoints/step-{END}" for run in ("straight", "stopped"))
    identical(straight, stopped)
    assert (straight / store.SHARED).read_bytes() == (stopped / store.SHARED).read_bytes()
    state = WholeState(stopped).shared
    assert {name.split("/")[1] for name in state} == {clipping["kind"]}
    assert state[f"clipping/{clipping['kind']}/updates"].tolist() == [END]
    columns = [records.read(tmp_path / run / "steps").column("norm_kept") for run in ("straight", "stopped")]
    assert columns[0].equals(columns[1]) and min(columns[0].to_pylist()) < 1
    assert "clipping_anew" not in events(tmp_path / "stopped")


@pytest.mark.slow
def test_other_layouts_and_kinds(corpus: Path, tmp_path: Path) -> None:
    """The averages go on under another layout; another kind begins its own, and says so; without any they are gone."""

    def at(steps: int, clipping: Any, **parts: Any) -> RunConfig:
        return config(corpus, tmp_path / "run", steps, clipping, **parts)

    def state(step: int) -> dict[str, Any]:
        held = WholeState(tmp_path / f"run/checkpoints/step-{step}").shared
        return {name: value.tolist() for name, value in held.items()}

    run_ranks(2, train, at(2, "norm", tensor=2))
    run_ranks(2, train, at(4, ADAGC, tensor=2))
    assert events(tmp_path / "run").count("clipping_anew") == 1
    assert state(2) == {} and state(4)["clipping/adagc/updates"] == [2]
    run_ranks(2, train, at(5, ADAGC, pipeline=2))
    assert events(tmp_path / "run").count("clipping_anew") == 1
    assert state(5)["clipping/adagc/updates"] == [3]
    for before, after in zip(*(state(step)["clipping/adagc/norms"] for step in (4, 5)), strict=True):
        assert 0 < after <= before * 1.05 and after > 0.9 * before
    run_ranks(1, train, at(6, ZCLIP))
    run_ranks(1, train, at(7, "norm"))
    assert events(tmp_path / "run").count("clipping_anew") == 2
    assert (
        state(6)["clipping/zclip/updates"] == [1]
        and "clipping/adagc/norms" not in state(6)
        and state(7) == {}
    )
