"""Every optimizer in real runs: stop and resume bit for bit, and on in another layout with all of its state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoint import store
from megastable.checkpoint.store import SHARED as FILE
from megastable.checkpoint.whole import WholeState
from megastable.config.tree import RunConfig
from megastable.run import records
from megastable_tools.convert.reshaping import Sizes, reshape
from tests.conftest import tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import identical, resave

STOP, END = 10, 20
# Resets after the stop and within a period; clipping at every update.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "stable_adamw": {},
    "lamb": {},
    "spam": {"spam": {"interval": 7, "threshold": 30.0, "warmup": 3}},
    "stable_spam": {"stable_spam": {"interval": 7, "max_decay": 0.8}},
    "spam-sparse": {"spam": {"interval": 7, "threshold": 30.0, "warmup": 3, "density": 0.4}},
    "muon": {"momentum": 0.95, "qk_clip": 0.06},
    "adafactor": {},
    "adafactor-momentum": {"adafactor": {"momentum": 0.9}},
}
SHARED = {"stable_spam", "adafactor", "adafactor-momentum"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_updates_are_ten_and_ten(name: str, corpus: Path, tmp_path: Path) -> None:
    optimizer = {"name": name.partition("-")[0], "lr": 3e-3} | OPTIMIZERS[name]

    def at(run: str, steps: int, **parts: Any) -> RunConfig:
        batch = {"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 0}
        model = dict(tiny(corpus, tmp_path).model) | ({"qk_norm": False} if name == "muon" else {})
        return tiny(corpus, tmp_path / run, train=batch, optimizer=optimizer, model=model, **parts)

    run_ranks(2, train, at("straight", END), at("stopped", STOP))
    run_ranks(2, train, at("stopped", END))
    straight, stopped, half = (
        tmp_path / run / f"checkpoints/step-{step}"
        for run, step in (("straight", END), ("stopped", END), ("stopped", STOP))
    )
    assert identical(straight, stopped) == 6
    assert (straight / FILE).exists() == (name in SHARED)
    if name in SHARED:
        assert (straight / FILE).read_bytes() == (stopped / FILE).read_bytes() != (half / FILE).read_bytes()
    assert store.read_state(straight).optimizer == optimizer["name"]
    tables = [records.read(tmp_path / run / "steps") for run in ("straight", "stopped")]
    for column in ("loss", "grad_norm", "lr", "update_ratio"):
        assert tables[0].column(column).equals(tables[1].column(column)), column

    # By the tool to two tensor ranks, by the engine to ZeRO 3, and back: the same state.
    before = WholeState(half)
    moved = reshape(half, tmp_path / "moved", Sizes(tensor=2, data=1)).checkpoint
    run_ranks(2, resave, at("moved", END, parallel={"tensor": 2}), tmp_path / "there/checkpoints")
    shutil.copytree(tmp_path / "moved", tmp_path / "zero3", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(tmp_path / "there/checkpoints", tmp_path / "zero3/checkpoints")
    run_ranks(2, resave, at("zero3", END, parallel={"zero": 3}), tmp_path / "back")
    for folder in (moved, tmp_path / "there/checkpoints" / half.name, tmp_path / "back" / half.name):
        after = WholeState(folder)
        assert after.names == before.names and after.adam_step == STOP and after.kinds == before.kinds
        for parameter in before.names:
            assert after.kinds_of(parameter) == before.kinds_of(parameter)
            for kind in before.kinds_of(parameter):
                assert torch.equal(after.tensor(parameter, kind), before.tensor(parameter, kind))
        assert after.shared.keys() == before.shared.keys()
        for key, tensor in before.shared.items():
            assert torch.equal(after.shared[key], tensor), key
    assert run_ranks(2, train, at("zero3", END, parallel={"zero": 3})) == [0, 0]
    losses = [
        records.read(tmp_path / run / "steps").column("loss").to_pylist() for run in ("straight", "zero3")
    ]
    assert losses[1] == pytest.approx(losses[0][STOP:], rel=3e-3)
