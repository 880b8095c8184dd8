"""Bad data in a real run: caught, attributed, rewound, skipped; exact to the byte, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megastable import errors, records
from megastable.config import RunConfig
from megastable.data.plant import Planted, plant
from megastable.data.skips import read_ledger
from megastable.rundir import RunDirectory
from tests.conftest import tiny, write_corpus
from tests.distributed import run_ranks
from tests.test_resume import identical

STEPS = 90
FIRST_BAD = 71


def recipe(corpus: Path, run: Path, **parts: Any) -> RunConfig:
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0}
    defaults: dict[str, Any] = {
        "train": train,
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 10, "total_steps": STEPS},
        "checkpoint": {"interval": 0},
    }
    return tiny(corpus, run, **{**defaults, **parts})


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """A corpus with 20 samples of noise, in parts of the batches of the steps 71 to 73."""
    folder = tmp_path_factory.mktemp("planted")
    write_corpus(folder / "clean", ids=20)
    (folder / "clean/tokenizer.model").write_bytes(b"")  # copied along, never read
    config = recipe(folder / "clean", folder / "run")
    what, _ = plant(folder / "clean", folder / "bad", config, step=FIRST_BAD, samples=20)
    return folder / "bad", what


def train(config: RunConfig) -> tuple[int, str]:
    from megastable import train as module

    try:
        return module.train(config, Path("recipe.yaml")), ""
    except errors.MegastableError as error:
        return error.code, str(error)


def incidents(run: Path, what: str = "closed") -> list[dict[str, Any]]:
    found = [e for e in RunDirectory(run).events("incident") if e["what"] == what]
    return [e["summary"] for e in found] if what == "closed" else found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2": (2, {"parallel": {"tensor": 2}}),
    "zero1-dp2": (2, {}),
    "zero2-dp2": (2, {"parallel": {"zero": 2}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rewind_is_exact(name: str, planted: tuple[Path, Planted], tmp_path: Path) -> None:
    """The run that hit the bad region ends with the bytes of a run that was told to skip it from the start."""
    world, parts = LAYOUTS[name]
    corpus, what = planted
    hit, told = tmp_path / "hit", tmp_path / "told"
    assert run_ranks(world, train, recipe(corpus, hit, **parts)) == [(0, "")] * world
    (incident,) = incidents(hit)
    assert incident["cause"] == "data" and incident["outcome"] == "healed"
    assert [tuple(r) for r in incident["positions"]] == [what.positions]
    assert incident["documents"] == [d.model_dump() for d in what.documents]
    assert incident["steps_lost"] <= 25 and incident["batches_discarded"] <= 4
    skips = [(e.first, e.end) for e in read_ledger(hit / "skips.jsonl")]
    data = {"corpora": [{"path": corpus}], "skip": skips}
    assert run_ranks(world, train, recipe(corpus, told, **parts, data=data)) == [(0, "")] * world
    assert incidents(told) == [] and not list(RunDirectory(told).events("discarded"))
    assert identical(hit / f"checkpoints/step-{STEPS}", told / f"checkpoints/step-{STEPS}") > 20
    one, other = (records.read(run / "steps") for run in (hit, told))
    for column in ("step", "first_position", "next_position", "loss", "grad_norm", "lr", "applied"):
        assert one.column(column).equals(other.column(column)), column
