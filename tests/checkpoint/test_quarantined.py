"""Checkpoints whose checksums are right and whose content is wrong: quarantined before a step is done on them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drills.poison import Kind, poison_checkpoint
from megastable.base import errors
from megastable.checkpoint import markers, store
from megastable.checkpoint.vitals import pair_losses
from megastable.config.tree import RunConfig
from megastable_tools.convert.catalogue import accept_checkpoint, list_entries
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks
from tests.journal import events
from tests.training.test_failures import batch, train
from tests.training.test_resume import identical

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero1-dp2": (2, {}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
}


def at(corpus: Path, run: Path, layout: str, steps: int, interval: int = 5, **parts: Any) -> RunConfig:
    checkpoint = {"interval": interval, "keep": 9} | parts.pop("checkpoint", {})
    train = batch(steps=steps, micro_batch=4)
    return tiny(corpus, run, train=train, checkpoint=checkpoint, **LAYOUTS[layout][1], **parts)


def rejected(run: Path) -> dict[str, str]:
    return {e["name"]: e["problem"] for e in events(run, "checkpoint_rejected")}


@pytest.fixture(scope="module")
def ten(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process with checkpoints at the steps 5 and 10: to be copied."""
    run = tmp_path_factory.mktemp("ten") / "run"
    assert run_ranks(1, train, at(corpus, run, "one", 10)) == [(0, "")]
    return run


CASES = [
    ("weight", "zero1-dp2", "zero1-dp2"),
    ("weight", "pp2", "one"),
    ("second_moments", "zero1-dp2", "tp2"),
    ("second_moments", "tp2", "tp2"),
    ("block", "pp2", "pp2"),
    ("block", "tp2", "zero3-dp2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), CASES)
def test_the_one_before_is_taken_in_the_same_start(
    kind: Kind, before: str, after: str, corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_ranks(LAYOUTS[before][0], train, at(corpus, run, before, 6, 2))[0] == (0, "")
    assert poison_checkpoint(run / "checkpoints", kind).name == "step-6"
    assert not store.list_problems(run / "checkpoints/step-6")  # every checksum is right
    assert run_ranks(LAYOUTS[after][0], train, at(corpus, run, after, 8, 2))[0] == (0, "")
    assert list(rejected(run)) == ["step-6"] and "its content is not" in rejected(run)["step-6"]
    assert [e["step"] for e in events(run, "resumed")] == [4]
    aside = run / "checkpoints/rejected-step-6"
    assert markers.read_bad_ruling(aside) is not None and markers.read_health(aside) is None
    (closed,) = [e["summary"] for e in events(run, "incident") if e["what"] == "closed"]
    assert (closed["cause"], closed["verdict"], closed["steps_lost"]) == ("storage", "damaged_checkpoint", 2)
    assert not (run / "skips.jsonl").exists() and not events(run, "handover", "discarded")
    if before == after:
        straight = tmp_path / "straight"
        run_ranks(LAYOUTS[before][0], train, at(corpus, straight, before, 8, 2))
        world = LAYOUTS[before][0]
        assert identical(*(r / "checkpoints/step-8" for r in (run, straight))) == 3 * world


@pytest.mark.slow
def test_three_in_a_row_and_a_person_who_accepts_one(corpus: Path, tmp_path: Path) -> None:
    """All that are bad are passed over in one start; where all are bad the run says so, and a person may accept one."""
    run, folder = tmp_path / "run", tmp_path / "run/checkpoints"
    assert run_ranks(2, train, at(corpus, run, "zero1-dp2", 8, 2)) == [(0, "")] * 2
    for step, kind in ((8, "weight"), (6, "second_moments"), (4, "block")):
        poison_checkpoint(folder, kind, step=step)  # type: ignore[arg-type]
    assert run_ranks(2, train, at(corpus, run, "zero1-dp2", 10, 2)) == [(0, "")] * 2
    assert sorted(rejected(run)) == ["step-4", "step-6", "step-8"]
    assert [e["step"] for e in events(run, "resumed")] == [2]
    aside = {path.name for path in folder.glob("rejected-*")}
    assert aside == {"rejected-step-4", "rejected-step-6", "rejected-step-8"}
    # Whoever starts it again has nothing to do with them.
    assert run_ranks(2, train, at(corpus, run, "zero1-dp2", 12, 2)) == [(0, "")] * 2
    assert [e["step"] for e in events(run, "resumed")] == [2, 10] and len(rejected(run)) == 3

    for path in store.newest_first(folder):
        poison_checkpoint(folder, "block", step=store.step_of(path))
    left = [path.name for path in store.newest_first(folder)]
    for _ in range(2):  # the second start knows it from the markers
        for code, message in run_ranks(2, train, at(corpus, run, "zero1-dp2", 14, 2)):
            assert code == errors.BAD_INPUT and f"none of its {len(left)} checkpoints can be used" in message
            assert f"accept {folder / 'step-12'}" in message
    assert [path.name for path in store.newest_first(folder)] == left
    assert "is accepted" in accept_checkpoint(folder / "step-12", "a block was scaled on purpose")
    assert run_ranks(2, train, at(corpus, run, "zero1-dp2", 14, 2)) == [(0, "")] * 2
    assert [e["step"] for e in events(run, "resumed")][-1] == 12
    assert any("accepted by a person" in e["text"] for e in events(run, "warning"))


def test_a_state_that_computes_something_else_is_passed_over_and_named(corpus: Path, tmp_path: Path) -> None:
    """Signs that are turned leave every size as it was: the probe samples tell."""
    run, folder = tmp_path / "run", tmp_path / "run/checkpoints"
    run_ranks(1, train, at(corpus, run, "one", 15))
    run_ranks(1, turned, folder)
    assert run_ranks(1, train, at(corpus, run, "one", 20)) == [(0, "")]
    assert "probe samples" in rejected(run)["step-15"]
    assert [e["step"] for e in events(run, "resumed")] == [10]
    assert markers.read_bad_ruling(folder / "rejected-step-15") is not None


def turned(folder: Path) -> None:
    """All weights of the newest checkpoint with the other sign, every checksum mended."""
    import numpy as np

    from drills import poison as module

    module._EDITS["block"] = np.negative
    module.poison_checkpoint(folder, "block")


@pytest.mark.slow
def test_where_what_computes_is_wrong_no_checkpoint_is_quarantined(
    corpus: Path, ten: Path, tmp_path: Path
) -> None:
    """Everywhere alike, or less the less a state has learnt: then the oldest may even stay within what rounding does.
    A person who knows why takes the newest, or an older one; what is passed over then is not quarantined, either."""
    run, folder = tmp_path / "run", tmp_path / "run/checkpoints"
    shutil.copytree(ten, run)
    for factor, told in ((8.0, "none of its 2 checkpoints"), (2.0, "step-5 does not prove")):
        ((code, message),) = run_ranks(1, train_elsewhere, at(corpus, run, "one", 15), factor)
        assert code == errors.BAD_INPUT and "kernels, versions and hardware" in message and told in message
        assert f"accept {folder / 'step-10'}" in message
        assert [path.name for path in store.newest_first(folder)] == ["step-10", "step-5"]
        assert all(markers.read_bad_ruling(path) is None for path in store.newest_first(folder))
    older = tmp_path / "older"
    shutil.copytree(run, older)
    accept_checkpoint(older / "checkpoints/step-5", "")
    assert run_ranks(1, train_elsewhere, at(corpus, older, "one", 6), 8.0) == [(0, "")]
    assert [e["step"] for e in events(older, "resumed")] == [5]
    assert markers.read_bad_ruling(older / "checkpoints/rejected-step-10") is None
    accept_checkpoint(folder / "step-10", "")
    assert run_ranks(1, train_elsewhere, at(corpus, run, "one", 11), 8.0) == [(0, "")]
    assert [e["step"] for e in events(run, "resumed")] == [10]


def train_elsewhere(config: RunConfig, factor: float) -> tuple[int, str]:
    """Where every product comes out larger by `factor`, as a wrong kernel would have it."""
    import torch
    from torch.nn import functional

    real = functional.linear

    def linear(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return real(x, *args) * factor

    functional.linear = linear  # type: ignore[assignment]
    return train(config)


@pytest.mark.slow
def test_a_state_that_is_bad_when_it_is_saved_never_counts_as_healthy(corpus: Path, tmp_path: Path) -> None:
    """It holds what it was saved with, so it is not quarantined either. It is finite, so nothing else finds it."""
    run, folder = tmp_path / "run", tmp_path / "run/checkpoints"
    parts: dict[str, Any] = {"stability": {"enabled": False}, "checkpoint": {"healthy_after": 0}}
    run_ranks(1, train_ill, at(corpus, run, "one", 15, **parts), 15)
    assert [markers.read_health(folder / f"step-{s}") is not None for s in (5, 10, 15)] == [True, True, False]
    vitals = store.read_state(folder / "step-15").vitals
    assert vitals is not None and "above the checkpoint before" in vitals.doubt
    (warning,) = events(run, "warning")
    assert warning["step"] == 15 and "will not count as healthy" in warning["text"]
    assert run_ranks(1, train, at(corpus, run, "one", 16, **parts)) == [(0, "")]
    assert [e["step"] for e in events(run, "resumed")] == [15] and not rejected(run)
    assert markers.read_health(folder / "step-15") is None
    [entry] = [e for e in list_entries(run) if e.step == 15]
    assert entry.state == "fresh" and "will not count as healthy" in entry.problem


def train_ill(config: RunConfig, step: int) -> tuple[int, str]:
    """Weights of 1e4 in the head of the state that is saved after `step`. (Before a norm they would change nothing.)"""
    from megastable.training.checkpoints import Checkpoints

    real = Checkpoints.save_state

    def save(self: Checkpoints, state: Any, wait: bool = False) -> bool:
        if state.step == step:
            state_of = self.engine.flat_state()
            (head,) = (f for f in state_of.fragments if f.name == "head.weight")
            piece = state_of.view_piece(head, "weight")
            assert piece is not None
            piece[::100] = 1e4
            self.engine.refresh_weights()
        return real(self, state, wait)

    Checkpoints.save_state = save  # type: ignore[method-assign]
    return train(config)


CHANGES: dict[str, dict[str, Any]] = {  # layouts: see CASES
    "precision": {"precision": {"kind": "fp32"}},
    "moments": {"optimizer": {"lr": 3e-3, "moments": "bf16", "betas": [0.0, 0.999]}},
    "kernels": {"kernels": {"attention": "reference", "loss": "reference"}},
    "documents": {"data": {"keep_documents_apart": True}},
    "corpus": {"data": {"accept_changed_manifest": True}},
}


@pytest.mark.slow
def test_what_may_change_at_a_resume_quarantines_nobody(tmp_path: Path) -> None:
    """What rounds otherwise moves losses by less than a tenth of the bound; what changes the samples (other tokens at
    their positions, documents that see each other) leaves nothing to compare."""
    corpus = tmp_path / "corpus"
    write_corpus(corpus, seed=1)
    run_ranks(1, train, at(corpus, tmp_path / "run", "one", 10))
    for name, parts in CHANGES.items():
        run = tmp_path / f"run-{name}"
        shutil.copytree(tmp_path / "run", run)
        if name == "corpus":
            shutil.rmtree(corpus)
            write_corpus(corpus, seed=2)
        parts = parts | {"data": {"corpora": [{"path": corpus}]} | parts.get("data", {})}
        assert run_ranks(1, train, at(corpus, run, "one", 11, **parts)) == [(0, "")], name
        (resumed,) = events(run, "resumed")
        assert resumed["step"] == 10 and not rejected(run), name
        assert resumed["changes"]["losses"] < 0.005, name
        now, before = (store.read_state(run / f"checkpoints/step-{step}").vitals for step in (11, 10))
        assert now is not None and before is not None
        assert len(pair_losses(before, now)) == (0 if name in ("documents", "corpus") else 32), name
