"""Samples that come back in a real run: deferred ones, with trouble again; and those whose conviction was wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.data.plant import plant
from megastable.data.skip_ledger import SampleEntry, read_ledger
from megastable.run.directory import RunDirectory
from megastable.run.events.stability_events import IncidentEvent
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.engine.test_gate import trainer_of
from tests.recovery.test_recovery import easy, incidents, recipe, samples_of, spoil

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


@pytest.mark.slow
def test_a_weak_conviction_is_withdrawn_when_it_was_the_rate(tmp_path: Path) -> None:
    """A bad sample in the step at which the weights are spoilt, four times: it was convicted by less than 100 to 1, as
    it does not explain the trouble; when nothing but the rate is left to blame it is read again."""
    run = tmp_path / "run"
    write_corpus(tmp_path / "clean", ids=20)
    (tmp_path / "clean/tokenizer.model").write_bytes(b"")
    train = {"steps": 60, "eval_samples": 0}
    config = recipe(tmp_path / "clean", run, train=train)
    what, _ = plant(tmp_path / "clean", tmp_path / "bad", config, step=32, samples=1)
    stability = {"policy": {"rewarm_steps": 10, "verify_steps": 10}}
    config = recipe(tmp_path / "bad", run, train=train, stability=stability)
    (end,) = run_ranks(1, spoil, config, "weights", [32], 4)
    assert end["code"] == 0
    events = [e for e in RunDirectory(run).events(IncidentEvent) if e["what"] in ("attributed", "released")]
    told = [(e["what"], e.get("cause")) for e in events]
    assert told[:5] == [
        ("attributed", "data"), ("attributed", "state"), ("attributed", "state"), ("attributed", "learning_rate"),
        ("released", None),
    ]  # fmt: skip
    assert [tuple(r) for r in events[0]["positions"]] == what.positions and events[0]["odds"] < 2
    assert [tuple(r) for r in events[4]["positions"]] == what.positions
