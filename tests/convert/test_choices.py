"""Checkpoints are reshaped, averaged, compared and branched for every architecture: `norms=both` has more norms."""

from __future__ import annotations

from pathlib import Path

import torch

from megastable.checkpoint.new_run import ADAM, write_run
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config.tree import ScheduleConfig
from megastable.convert.average import average
from megastable.convert.branching import branch
from megastable.convert.diff import differences
from megastable.convert.reshaping import Sizes, reshape
from tests.checkpoint.states import LAYOUTS, numbers, recipe_of, state_of

GEMMA = {
    "norms": "both", "zero_centered_norms": True, "activation": "gelu", "embedding_scale": "sqrt_hidden",
    "attention_softcap": 3.0, "logit_softcap": 5.0, "window": 5, "full_attention_every": 2,
}  # fmt: skip
POST = "blocks.1.mlp_post_norm.weight"


def at_peak_rate(out: Path, layout: tuple[int, int, int, int], seed: int) -> Path:
    """As `make_run`, where a branch may begin."""
    run = recipe_of(layout, **GEMMA)
    run = run.model_copy(update={"schedule": ScheduleConfig(kind="constant", warmup_steps=0)})
    held = numbers(run, seed)
    return write_run(
        out, run, state_of(layout), lambda name, kind: held[name, kind], optimizer=ADAM, origin={}
    )


def test_checkpoints_of_both_norms_are_reshaped_averaged_compared_and_branched(tmp_path: Path) -> None:
    one = at_peak_rate(tmp_path / "one", LAYOUTS["tp2-pp2"], seed=1)
    other = at_peak_rate(tmp_path / "other", LAYOUTS["dp2-zero3"], seed=2)
    a, b = WholeState(one), WholeState(other)
    made = reshape(one, tmp_path / "reshaped", Sizes(1, 1, 3, 2)).checkpoint
    assert all(d.outcome == "identical" for d in differences(a, WholeState(made)))
    assert run_of(made).model == run_of(one).model
    branched = branch(one, tmp_path / "branched", 10).made.checkpoint
    assert all(d.outcome == "identical" for d in differences(a, WholeState(branched)))
    mean = WholeState(average([one, other], tmp_path / "mean").checkpoint)
    assert POST in mean.names and POST in a.names
    expected = (a.tensor(POST, "weight").double() + b.tensor(POST, "weight").double()) / 2
    assert torch.equal(mean.tensor(POST, "weight"), expected.float())
    assert all(d.outcome == "differs" for d in differences(a, b))
