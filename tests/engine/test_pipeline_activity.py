"""What a rank of a pipeline says of itself in its heartbeats: what it does, and how many collectives it has entered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.config.tree import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.engine.test_gate import first_batch, start_of


def watch(config: RunConfig) -> dict[str, Any]:
    """A step: the activities in order, and what is entered after it; and before it, of a stage that waits."""
    import torch.distributed as dist

    from megastable.base import activity
    from megastable.train import Trainer
    from megastable.training.beats import entered

    start = start_of(config)
    trainer = Trainer(start, start.heart.stop, start.heart)
    before, seen = entered(), list[str]()
    enter = activity.enter
    waiting = []

    def note(name: str) -> None:
        seen.append(name)
        enter(name)

    begins = activity.exchange_begins

    def noted(count: int) -> None:
        begins(count)
        waiting.append(entered()["0"])

    activity.enter, activity.exchange_begins = note, noted  # type: ignore[assignment]
    trainer.engine.train_step(first_batch(start), 1e-3, lambda measured: True)
    dist.barrier()
    return {"before": before["0"], "seen": seen, "after": entered()["0"], "waiting": waiting}


def test_sends_and_receives_are_no_collectives_and_every_activity_is_named(
    corpus: Path, tmp_path: Path
) -> None:
    """The stage between two others sends and receives twice as often as they do."""
    changes = {"parallel": {"pipeline": 3}, "model": {"layers": 3}}
    told = run_ranks(3, watch, tiny(corpus, tmp_path / "run", **changes))
    assert len({one["before"] for one in told}) == len({one["after"] for one in told}) == 1
    for one in told:
        assert {"data", "forward", "backward", "exchange", "reduce", "gate", "optimizer", "step"} >= set(
            one["seen"]
        )
        assert {"forward", "backward", "exchange", "reduce", "gate", "optimizer"} <= set(one["seen"])
        assert one["waiting"] and max(one["waiting"]) <= one["after"]
        assert set(one["waiting"]) <= {one["before"], *range(one["before"], one["after"])}
    assert len(told[1]["waiting"]) == 2 * len(told[0]["waiting"])
