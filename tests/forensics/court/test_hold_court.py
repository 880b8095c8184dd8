"""A trial held again, from a checkpoint: it repeats the run bit for bit, leaves it alone, and says who chose well."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastable.data.plant import plant_corruption
from megastable.run import records
from megastable_tools.forensics.history import History
from tests.conftest import write_corpus
from tests.distributed import run_ranks
from tests.forensics.court.commands import hash_files, megastable
from tests.recovery.test_recovery import FIRST_BAD, incidents, recipe, train

CHECKPOINTS = {"interval": 10, "keep": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that met 20 samples of noise in its steps 31 to 33, rewound and skipped them."""
    folder = tmp_path_factory.mktemp("court")
    write_corpus(folder / "clean", ids=20)
    (folder / "clean/tokenizer.model").write_bytes(b"")  # copied along, never read
    plant_corruption(
        folder / "clean", folder / "bad", recipe(folder / "clean", folder / "run"), step=FIRST_BAD, samples=20
    )
    config = recipe(folder / "bad", folder / "run", checkpoint=CHECKPOINTS)
    assert run_ranks(1, train, config) == [(0, "")]
    assert [incident["onset"] for incident in incidents(folder / "run")] == [FIRST_BAD]
    return folder / "run"


def test_court_finds_a_planted_region_well_chosen(run: Path) -> None:
    before = hash_files(run)
    done = megastable("court", "run", 1, "--json", "--picture", "court.png", folder=run.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["choice"], found["best"], found["good"]) == ("other data", "other data", True)
    assert (found["first_step"], found["replayed_steps"], found["suspects"]) == (FIRST_BAD, 0, 20)
    branches = {branch["name"]: branch for branch in found["branches"]}
    assert list(branches) == [
        "nothing", "other data", "cap_lr", "rewarm", "reset_moments", "clip", "z_loss", "beta2", "other_kernels",
        "swiglu_clamp", "cut_lr", "cut_lr_twice",
    ]  # fmt: skip
    nothing = branches["nothing"]
    assert nothing["difference"] > max(0.01, 3 * nothing["difference_error"])
    assert branches["other data"]["difference"] == 0 and found["trial"]["verdict"] == "bad"
    assert all(len(branch["losses"]) == 16 for branch in branches.values())
    # The rate rises no more, and no factor of this SwiGLU is beyond the clamp.
    assert len({tuple(branch["losses"]) for branch in branches.values()}) >= len(branches) - 2
    assert (run.parent / "court.png").stat().st_size > 10_000
    assert hash_files(run) == before


def repeat_steps(root: Path) -> dict[str, Any]:
    """What the run did from step 31 to 40, again: from its checkpoint of step 30, after nothing, and as a branch."""
    from megastable_tools.forensics.court.hold_court import as_recorded, open_steps
    from megastable_tools.forensics.court.offline_run import OfflineRun, recall_rate, recipe_of

    history = History(root)
    case = open_steps(history, 46, 46)
    config = recipe_of(case.checkpoint, history.config)
    rest = [done for done in history.list_steps(46, 50) if not done.undone]
    with closing(OfflineRun(case.checkpoint, config, case.library.source, case.selection)) as offline:
        offline.load_checkpoint()
        replayed = offline.replay_steps(case.steps, lambda step: None)
        began, recorded = offline.start.updates, as_recorded(case)

        def limit_rate(updates: int, rate: float) -> float:
            at = updates - began
            return (
                recall_rate(rate, recorded[at]) if at < len(recorded) else offline.limit_rate(updates, rate)
            )

        batches = [history.positions_of(done) for done in rest]
        trained = offline.train_on(batches, limit_rate, lambda step: None)
    return {"checkpoint": case.checkpoint.name, "replayed": replayed, "trained": trained}


def test_offline_run_repeats_the_run_bit_for_bit(run: Path) -> None:
    (found,) = run_ranks(1, repeat_steps, run)
    table = records.read_newest_records(run / "steps")
    losses, norms = (np.array(table.column(name).to_pylist(), np.float32) for name in ("loss", "grad_norm"))
    assert found["checkpoint"] == "step-40"
    np.testing.assert_array_equal(found["replayed"].astype(np.float32), losses[40:45])
    np.testing.assert_array_equal(found["trained"].losses.astype(np.float32), losses[45:50])
    np.testing.assert_array_equal(found["trained"].norms.astype(np.float32), norms[45:50])


def test_court_finds_training_on_bad_data_badly_chosen(run: Path, tmp_path: Path) -> None:
    parts: dict[str, Any] = {"checkpoint": CHECKPOINTS, "stability": {"enabled": False}}
    assert run_ranks(1, train, recipe(run.parent / "bad", tmp_path / "run", **parts)) == [(0, "")]
    done = megastable(
        "court", "run", "--step", "31-33", "--steps", 8, "--only", "nothing", "--json", folder=tmp_path
    )
    found = json.loads(done.stdout)
    assert (done.returncode, found["choice"], found["best"], found["good"]) == (
        1,
        "nothing",
        "other data",
        False,
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", 1, "--step", 3), "say what to try"),
        (("run", 7), "there is no incident 7; those of this run: 1"),
        (("run", "--step", 900), "step 900 was not recorded"),
        (("run", "--step", 7), "has no good checkpoint from before step 7; there are step-50"),
        (("run", 1, "--only", "prayer"), "--only 'prayer': choose from nothing, other data"),
    ],
    ids=lambda given: " ".join(map(str, given)) if isinstance(given, tuple) else "",
)
def test_court_refuses_bad_input_in_one_sentence(run: Path, words: tuple[object, ...], told: str) -> None:
    from megastable.commands.root import app
    from tests.tools.cli import call

    done = call(app, "court", *words, cwd=run.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
