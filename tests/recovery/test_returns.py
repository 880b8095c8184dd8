"""Samples that come back in a real run: deferred ones, with trouble again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.data.skip_ledger import SampleEntry, read_ledger
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import easy, incidents, recipe, samples_of

__all__ = ["easy"]

HARMFUL = 250  # the position, at first, of a sample that harms whichever state reads it


def harm(config: RunConfig) -> dict[str, Any]:
    """Train where one sample, wherever the order has it, spoils the weights when it is read."""
    trainer = trainer_of(config)
    engine, real = trainer.engine, trainer.engine.train_step
    source = trainer.order.source
    sample = source.order.locate([HARMFUL]).sequence.tolist()

    def train_step(micro_batches: Any, *args: Any, **options: Any) -> Any:
        positions = torch.cat([m.positions for m in micro_batches]).numpy()
        if not engine._probing and set(sample) & set(source.order.locate(positions).sequence.tolist()):
            engine._wait_for_copies()
            master = engine.masters[0]
            master.data += torch.randn(master.shape, generator=torch.Generator().manual_seed(1)) * 0.2
            engine.refresh_weights()
        return real(micro_batches, *args, **options)

    engine.train_step = train_step  # type: ignore[method-assign]
    return {"code": trainer.train(), "sample": sample}


@pytest.mark.slow
def test_deferred_samples_that_come_with_trouble_again_are_convicted(easy: Path, tmp_path: Path) -> None:
    """Alone they are ordinary, on every state: that the trouble came with them twice convicts them. Nobody else is
    lost."""
    run = tmp_path / "run"
    train = {"steps": 70, "eval_samples": 0}
    policy = {"recur_steps": 12, "verify_steps": 6}
    (end,) = run_ranks(1, harm, recipe(easy, run, train=train, stability={"policy": policy}))
    assert end["code"] == 0
    first, second = incidents(run)
    assert (first["cause"], second["cause"]) == ("state", "data")
    assert first["positions"] == [] and second["deferred"] == []
    assert second["positions"] == first["returns"] and "came with trouble before" in second["reasons"][0]
    assert second["outcome"] == "healed" and second["documents"]
    entries = read_ledger(run / "skips.jsonl")
    assert entries and all(isinstance(entry, SampleEntry) for entry in entries)
    trained = [sample for _, sample in samples_of(run)]
    assert end["sample"][0] not in trained and len(trained) == len(set(trained)) == 8 * 70
