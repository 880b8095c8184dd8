"""The FP8 recipes in small on a CPU, emulated: the keys that they set, with the sizes of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.base.installation import ROOT
from megastable.config.recipe import load
from megastable.model.sizes import fp8_linears
from megastable.run import records
from tests.conftest import LENGTH
from tests.distributed import run_ranks, train

STEPS = 4
SMALL = (
    "model.layers=3 model.hidden=32 model.heads=4 model.kv_heads=2 model.ffn=64 model.vocab_multiple=64 "
    f"model.sequence_length={LENGTH} parallel.tensor=1 parallel.sequence=false train.global_batch=4 "
    f"train.micro_batch=2 train.steps={STEPS} train.eval_samples=0 schedule.warmup_steps=1 checkpoint.at_end=false "
    "logging.trackers=[] logging.peak_tflops=1.0 precision.fp8.backend=emulated"
).split()


@pytest.mark.parametrize("name", ["1.3b-fp8", "7b-fp8"])
def test_an_fp8_recipe_trains(name: str, corpus: Path, tmp_path: Path) -> None:
    made = load(ROOT / f"launch/recipes/{name}.yaml", [
        *SMALL, f"data.corpora.0.path={corpus}", f"run.dir={tmp_path / 'run'}",
    ])  # fmt: skip
    assert [bool(fp8_linears(made, block)) for block in range(3)] == [False, True, False]
    assert run_ranks(1, train, made) == [0]
    table = records.read(tmp_path / "run/steps")
    assert table.column("fp8").to_pylist() == [1] * STEPS
    losses = table.column("loss").to_pylist()
    assert losses[-1] < losses[0] and table.column("applied").to_pylist() == [True] * STEPS
