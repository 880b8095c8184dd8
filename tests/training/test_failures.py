"""What goes wrong around a run: signals, damaged checkpoints, full disks, changed data. Nothing is lost."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megastable.base import errors
from megastable.checkpoint import store
from megastable.config.tree import RunConfig
from megastable.run import records
from tests.conftest import tiny, write_corpus
from tests.distributed import run_main, run_ranks
from tests.journal import events
from tests.patience import PATIENCE
from tests.training.test_resume import identical


def train(
    config: RunConfig, fault: Callable[[], None] | None = None, at_step: int = 1, at_rank: int | None = None
) -> tuple[int, str]:
    """(exit code, message) of a run on this rank, as `main` would end. `fault` happens before a step of this
    process, on one rank or on all.
    """
    import torch.distributed as dist

    from megastable import train as module
    from megastable.engine.engine import Engine

    real, calls = Engine.train_step, 0

    def train_step(self: Engine, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault is not None and calls == at_step and at_rank in (None, dist.get_rank()):
            fault()
        return real(self, *args, **options)

    Engine.train_step = train_step  # type: ignore[method-assign]
    try:
        return module.train(config, Path("recipe.yaml")), ""
    except errors.MegastableError as error:
        return error.code, str(error)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def keep_files_small(largest: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))


def kill_amid_files() -> None:
    """SIGKILL this process in its next save, when its tensors are written and the rest of its files is not."""
    from megastable.checkpoint import parts

    def write_file(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    parts.write_file = write_file


def kill_after_rename() -> None:
    """SIGKILL this process as soon as the next checkpoint has its name."""
    real, name = os.replace, "step-15"

    def replace(source: Any, target: Any) -> None:
        real(source, target)
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace  # type: ignore[assignment]


def batch(**options: Any) -> dict[str, Any]:
    return {"steps": 20, "global_batch": 8, "micro_batch": 2, "eval_samples": 0, "eval_interval": 0} | options


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint, at step 20, of a run on two ranks to which nothing happened."""
    run = tmp_path_factory.mktemp("straight")
    assert run_ranks(2, train, tiny(corpus, run, train=batch())) == [(0, ""), (0, "")]
    return run / "checkpoints/step-20"


def test_sigterm_to_one_rank_ends_all_in_a_checkpoint(corpus: Path, tmp_path: Path, straight: Path) -> None:
    stopped = tmp_path / "stopped"
    answers = run_ranks(2, train, tiny(corpus, stopped, train=batch()), terminate, 7, 1)
    assert [code for code, _ in answers] == [errors.STOPPED, errors.STOPPED]
    (event,) = events(stopped, "stopped")
    assert event["step"] in (7, 8)  # the ballot of the step in which the signal came, or of the next one
    assert (stopped / "checkpoints" / store.LATEST).read_text() == f"step-{event['step']}"
    answers = run_ranks(2, train, tiny(corpus, stopped, train=batch()))
    assert [code for code, _ in answers] == [0, 0]
    assert identical(straight, stopped / "checkpoints/step-20") == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "written"),
    [
        (kill_amid_files, 0, False),
        (kill_amid_files, 1, False),
        (kill_after_rename, 0, True),
    ],
    ids=["rank 0 amid its files", "rank 1 amid its files", "between the renames"],
)
def test_a_process_killed_during_a_save(
    fault: Callable[[], None], rank: int, written: bool, corpus: Path, tmp_path: Path, straight: Path
) -> None:
    """SIGKILL, as by a scheduler or the kernel when memory is short: nothing in the process can react."""
    run = tmp_path / "run"
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 5, "asynchronous": False})
    with pytest.raises(AssertionError):  # of the harness: a rank is dead, which the other one may tell first
        run_ranks(2, train, config, fault, 12, rank)
    # What it left: the save of step 15 torn, or complete with `latest` still at the one before.
    folder = run / "checkpoints"
    torn = folder / f"{store.SAVING}step-15"
    assert (folder / store.LATEST).read_text() == "step-10"
    assert (folder / "step-15").exists() == written and torn.exists() != written
    assert written or any(torn.iterdir())

    assert run_ranks(2, train, config) == [(0, ""), (0, "")]
    assert [e["step"] for e in events(run, "resumed")] == [15 if written else 10]
    assert not events(run, "checkpoint_rejected") and not torn.exists()
    assert (folder / store.LATEST).read_text() == "step-20"
    assert identical(straight, folder / "step-20") == 6
    assert records.read_newest_records(run / "steps").num_rows == 20


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_full_disk_during_a_save(on_failure: str, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(2, train, tiny(corpus, run, train=batch(steps=10), checkpoint={"interval": 10}))
    kept = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    config = tiny(corpus, run, train=batch(), checkpoint={"interval": 5, "on_failure": on_failure})
    # The disk holds journal and records, but no file as large as the optimizer's state.
    answers = run_ranks(2, train, config, partial(keep_files_small, 100_000))
    failed = events(run, "checkpoint_failed")
    assert failed and "File too large" in failed[0]["problem"]
    if on_failure == "continue":
        # All steps were trained, but the last weights are nowhere: that is no success.
        assert [code for code, _ in answers] == [errors.NO_SPACE, errors.NO_SPACE]
        assert [e["step"] for e in failed] == [15, 20, 20]  # tried once more at the end
        assert records.read_newest_records(run / "steps").num_rows == 20
    else:
        assert [e["step"] for e in failed] == [15]
        for code, message in answers:
            assert code == errors.NO_SPACE and "Earlier ones are intact" in message
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == kept
    # With room again the run goes on from the checkpoint before.
    assert [code for code, _ in run_ranks(2, train, tiny(corpus, run, train=batch()))] == [0, 0]
    assert events(run, "resumed")[-1]["step"] == 10


@pytest.mark.slow
def test_a_shard_cut_off_while_training(tmp_path: Path) -> None:
    corpus, run = tmp_path / "corpus", tmp_path / "run"
    write_corpus(corpus)
    shard = corpus / "part-0.bin"
    content = shard.read_bytes()
    # The checkpoint of step 10 is complete before step 11 begins, however busy the machine is.
    config = tiny(corpus, run, train=batch(), checkpoint={"asynchronous": False})
    # One rank: others would be ended by the launcher, as soon as the first leaves with an error of its own.
    ((code, message),) = run_ranks(1, train, config, partial(os.truncate, shard, 0), 12)
    assert code == errors.BAD_INPUT and "part-0.bin became shorter while it was in use" in message
    shard.write_bytes(content)
    assert run_ranks(1, train, config) == [(0, "")]
    assert [e["step"] for e in events(run, "resumed")] == [10]
    assert records.read_newest_records(run / "steps").num_rows == 20


def test_a_finished_run_is_left_alone(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny(corpus, run, train=batch(steps=4))
    run_ranks(1, train, config)
    before = (run / "summary.json").read_bytes()
    assert run_ranks(1, train, config) == [(0, "")]
    assert (run / "summary.json").read_bytes() == before
    # The second one says so, too, for whoever asks how the newest start ended.
    assert [event["steps"] for event in events(run, "finished")] == [4, 4]


def break_the_training() -> None:
    """It ends in an error that nobody foresaw while a thread is at work."""
    from megastable import train as module

    def broken(*_: Any) -> int:
        ThreadPoolExecutor(1).submit(time.sleep, 10 * PATIENCE)
        raise RuntimeError("the chip is gone")

    module.train = broken


def test_an_unforeseen_error_does_not_wait_for_a_save(corpus: Path, tmp_path: Path) -> None:
    """The interpreter waits for its threads when it ends; the others wait for this rank to be gone."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(tiny(corpus, tmp_path / "run").model_dump_json())
    done = run_main(1, tmp_path / "said", str(recipe), prepare=break_the_training)
    assert done.code == errors.FAILED and "RuntimeError: the chip is gone" in done.stderr


def break_the_writer() -> None:
    """From now on the thread that writes ends in an error that nobody foresaw."""
    from megastable.checkpoint import saving

    def write_rank(*_: Any) -> Any:
        raise ValueError("nobody foresaw this")

    saving.write_rank = write_rank


@pytest.mark.slow
def test_all_ranks_hear_of_a_part_that_one_could_not_write(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny(corpus, run, train=batch(steps=12), checkpoint={"interval": 5})
    ended = run_ranks(2, partial(train, fault=break_the_writer, at_step=8, at_rank=1), config)
    assert [code for code, _ in ended] == [errors.NO_SPACE] * 2
    assert [e["step"] for e in events(run, "checkpoint")] == [5]
    failed = events(run, "checkpoint_failed")
    assert [e["step"] for e in failed] == [10, 12]
    assert {e["problem"] for e in failed} == {"rank 1: ValueError: nobody foresaw this"}
    store.verify_checkpoint(run / "checkpoints/step-5")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-5"]


def test_fp16_that_overflows_is_not_told_as_damaged_weights(corpus: Path, tmp_path: Path) -> None:
    """Its gradients are beyond fp16's range at every scale, or at all that were tried: no update was ever applied."""

    def overflowing(run: str, power: int, **stability: Any) -> RunConfig:
        return tiny(
            corpus, tmp_path / run, precision={"kind": "fp16", "initial_scale_power": power},
            model=tiny(corpus, tmp_path).model.model_dump(exclude_none=True) | {"z_loss": 1e9},
            train={"steps": 20, "global_batch": 4, "micro_batch": 4, "eval_samples": 0}, stability=stability,
        )  # fmt: skip

    tried = overflowing("tried", 32, max_discards=3)
    every = overflowing("every", 1, max_discards=6, policy={"rewinds": 0})
    ((tried_end, every_end),) = run_ranks(1, both, tried, every)
    for code, text in (tried_end, every_end):
        assert code == errors.UNSTABLE and "no update was ever applied" in text
        assert "precision.kind=bf16" in text and "data.skip" not in text and "damaged" not in text
    assert (
        re.search(r"scale of \S+e\+0[89]", tried_end[1]) and "precision.initial_scale_power" in tried_end[1]
    )
    assert "even at a loss scale of 1, the lowest" in every_end[1]


def both(*configs: RunConfig) -> list[tuple[int, str]]:
    return [train(config) for config in configs]
