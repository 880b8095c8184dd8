"""A local disk between the ranks and the shared directory: what was sealed there is not lost with the processes."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import errors
from megastable.checkpoint import store
from megastable.checkpoint.files import write_file
from megastable.checkpoint.staging import Sealed, Staging, newest_complete, upload
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointFailed, CheckpointRecovered, Resumed
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.test_failures import batch, keep_files_small, train
from tests.training.test_resume import identical


def kill_in_the_upload() -> None:
    """SIGKILL this process when its part is sealed on the local disk and not brought over."""
    from megastable.checkpoint import saving

    def upload(*_: object) -> None:
        # Both parts must be there: a checkpoint of which a rank's part is missing is none.
        os.kill(os.getpid(), signal.SIGKILL)

    saving.upload = upload  # type: ignore[assignment]


@pytest.mark.slow
def test_a_run_killed_in_an_upload_goes_on_from_the_local_disk(corpus: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert run_ranks(1, train, tiny(corpus, straight, train=batch())) == [(0, "")]
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": tmp_path / "disk"})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    assert not store.newest_first(run / "checkpoints")
    (staged,) = Staging(tmp_path / "disk", run).staged()
    assert staged.part.step == 15
    assert run_ranks(1, train, config) == [(0, "")]
    events = list(RunDirectory(run).events(CheckpointRecovered, Resumed))
    assert [(e["event"], e["step"]) for e in events] == [("checkpoint_recovered", 15), ("resumed", 15)]
    assert identical(straight / "checkpoints/step-20", run / "checkpoints/step-20") == 3
    store.verify(run / "checkpoints/step-15")
    assert not list((tmp_path / "disk").rglob("*.safetensors"))


def test_every_rank_writes_there_first_and_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 10, "staging": disk})
    assert run_ranks(2, train, config) == [(0, ""), (0, "")]
    for name in ("step-10", "step-20"):
        store.verify(run / "checkpoints" / name)
    assert not [path for path in disk.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_local_disk_that_is_full(corpus: Path, tmp_path: Path) -> None:
    """The save fails like one to a full shared directory; nothing of it remains."""
    disk = tmp_path / "disk"
    disk.write_text("no folder")
    config = tiny(corpus, tmp_path / "run", train=batch(), checkpoint={"staging": disk})
    ((code, message),) = run_ranks(1, train, config)
    assert code == errors.NO_SPACE and "could not be written" in message
    (failed, *_) = RunDirectory(tmp_path / "run").events(CheckpointFailed)
    assert "disk" in failed["problem"]
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_what_changed_on_the_local_disk_is_not_brought_over(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    record = write_file(here / "a", b"x" * 100)
    upload(here, {"a": record}, there)
    assert (there / "a").read_bytes() == b"x" * 100
    (here / "a").write_bytes(b"x" * 99 + b"y")
    with pytest.raises(OSError, match="has changed since it was written"):
        upload(here, {"a": record}, there)


def test_a_part_without_all_of_its_files_is_none(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "disk", tmp_path / "run")
    staging.folder(5).mkdir(parents=True)
    record = write_file(staging.folder(5) / "rank-00000.json", b"{}")
    seal = partial(Sealed, step=5, world=2, began=0.0, finite=True)
    staging.seal(seal(rank=0, files={"rank-00000.json": record}))
    staging.seal(seal(rank=1, files={"rank-00001.json": record}))
    assert [s.part.rank for s in staging.staged()] == [0]
    assert not Staging(tmp_path / "disk", tmp_path / "another").staged()
    staging.drop(5, 1)
    staging.drop(5, 0)
    assert not staging.folder(5).exists()


Part = tuple[int, float, int, int, bool]
PARTS = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from([1.0, 2.0]),
            st.integers(0, 2),
            st.integers(1, 3),
            st.booleans(),
        ),
        max_size=8,
    ),
    max_size=3,
)


@given(PARTS, st.integers(-1, 2))
def test_only_a_complete_and_finite_save_is_taken(seen: list[list[Part]], newer_than: int) -> None:
    save = newest_complete(seen, newer_than)

    def complete(at: int, began: float) -> bool:
        held = [part[2:] for found in seen for part in found if part[:2] == (at, began)]
        return (
            bool(held)
            and len({world for _, world, _ in held}) == 1
            and sorted({rank for rank, _, _ in held}) == list(range(held[0][1]))
            and all(finite for *_, finite in held)
        )

    saves = [
        (at, began) for at in range(4) for began in (1.0, 2.0) if at > newer_than and complete(at, began)
    ]
    assert save == max(saves, default=None)


@pytest.mark.slow
def test_a_new_run_in_the_directory_of_an_old_one_takes_nothing_of_it(corpus: Path, tmp_path: Path) -> None:
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": disk})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    assert Staging(disk, run).staged()
    shutil.rmtree(run)
    assert run_ranks(1, train, config) == [(0, "")]
    assert not list(RunDirectory(run).events(CheckpointRecovered, Resumed))
    assert not list(disk.rglob("*.safetensors"))


def train_with_small_files(config: RunConfig) -> tuple[int, str]:
    keep_files_small(20_000)
    return train(config)


@pytest.mark.slow
def test_what_cannot_be_brought_over_now_is_kept_for_the_next_start(corpus: Path, tmp_path: Path) -> None:
    """The shared directory may be full: the only copy of the newest checkpoint is not the thing to delete."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 15, "staging": disk})
    with pytest.raises(AssertionError):
        run_ranks(1, train, config, kill_in_the_upload)
    full = tiny(
        corpus, run, train=batch(steps=1), checkpoint={"interval": 0, "at_end": False, "staging": disk}
    )
    run_ranks(1, train_with_small_files, full)
    assert run_ranks(1, train, config) == [(0, "")]
    events = list(RunDirectory(run).events(CheckpointRecovered))
    assert [bool(e["problem"]) for e in events] == [True, False]
