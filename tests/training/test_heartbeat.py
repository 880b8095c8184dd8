"""What a rank says and hears through files: its progress, last words, stacks; a stop, an end."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed import DistNetworkError, distributed_c10d

from megastable.base import errors
from megastable.base.collectives import mark_collective
from megastable.base.errors import DataError, HandoverError
from megastable.checkpoint.store import LayoutState, RunState
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import Control, LastWords, Progress, folder_of
from megastable.training import rank_process as beats
from megastable.training.heartbeat import Heartbeat, describe_end
from megastable.training.rank_process import ENOUGH, STEPS, Beats, WorkBlocks, count_collectives
from tests.patience import PATIENCE, until


class Stop:
    asked = False

    def ask_to_stop(self) -> None:
        self.asked = True


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def heart(
    run: RunDirectory, rank: int = 0, attempt: int | None = 3, stop: Any = None, world: int = 2
) -> Heartbeat:
    return Heartbeat(run, rank, world, 99, stop or Stop(), attempt)


def state(step: int) -> RunState:
    layout = LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="fp32")
    return RunState(step=step, cursor=8 * step, order_fingerprint="abc", layout=layout)


def read(run: RunDirectory) -> Progress | None:
    try:
        return Progress.model_validate(json.loads(run.progress.read_text()))
    except OSError:
        return None


def want(run: RunDirectory, **wishes: Any) -> None:
    run.control.write_text(Control(**wishes).model_dump_json())


def test_progress_is_rank_0s_from_the_start_to_the_end(run: RunDirectory) -> None:
    with heart(run) as beat:
        assert until(lambda: read(run)).phase == "starting"
        beat.begin_step(state(4))
        assert until(lambda: (read(run) or beat).step == 4 and read(run)).phase == "starting"  # type: ignore[union-attr]
        beat.end_step(state(5), loss=float("nan"), seconds=0.5)
        beat.begin_step(state(5))
        found = until(lambda: (p := read(run)) and p.phase == "step" and p)
        assert (found.step, found.cursor, found.seconds, found.attempt) == (5, 40, 0.5, 3)
        assert found.loss != found.loss
        beat.enter_phase("checkpoint")
        until(lambda: read(run).phase == "checkpoint")  # type: ignore[union-attr]
    assert read(run).phase == "ended"  # type: ignore[union-attr]


def test_a_stop_and_the_stacks_are_asked_for_by_attempt(run: RunDirectory) -> None:
    stop = Stop()
    with heart(run, stop=stop):
        want(run, attempt=2, stop=True, dump=1)  # of an attempt of before
        time.sleep(0.6)
        assert not stop.asked
        run.control.write_text('{"attempt": 3, "st')  # being written
        time.sleep(0.3)
        want(run, attempt=3, stop=True, dump=1)
        until(lambda: stop.asked)
        stacks = until(lambda: (p := folder_of(run, 3) / "rank-0.stacks").exists() and p.read_text())
    assert stacks.startswith("rank 0 on ") and "test_heartbeat.py" in stacks


@pytest.mark.slow
def test_a_superseded_rank_ends_itself(run: RunDirectory) -> None:
    program = (
        "import pathlib, sys, time; from tests.training.test_heartbeat import RunDirectory, heart\n"
        "with heart(RunDirectory(pathlib.Path(sys.argv[1]))): time.sleep(60)"
    )
    want(run, attempt=4)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program, str(run.root)], cwd=root, timeout=PATIENCE)
    assert done.returncode == errors.SUPERSEDED


def fail(beat: Heartbeat) -> None:
    beat.begin_step(state(6))
    raise DataError("a shard is gone\nand more")


def test_last_words(run: RunDirectory) -> None:
    beat = heart(run, rank=1)
    with pytest.raises(DataError), beat:
        fail(beat)
    words = LastWords.model_validate(json.loads((folder_of(run, 3) / "rank-1.json").read_text()))
    assert (words.error, words.code, words.step, words.cursor) == ("DataError: a shard is gone", 2, 6, 48)
    assert words.alone and words.where == ""


def test_what_all_ranks_know_rank_0_says(run: RunDirectory) -> None:
    for rank in (0, 1):
        with pytest.raises(HandoverError), heart(run, rank=rank):
            raise mark_collective(HandoverError("go back"))
    assert [p.name for p in folder_of(run, 3).iterdir()] == ["rank-0.json"]


GLOO = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2968. Check the logs"


@pytest.mark.parametrize(
    ("error", "world", "lines"),
    [
        (RuntimeError(GLOO), 2, 1),
        (DistNetworkError("Connection reset by peer"), 2, 1),
        (RuntimeError(GLOO), 1, 4),  # there is no other
        (ConnectionResetError(104, "Connection reset by peer"), 2, 4),  # of a file system, a server, a pipe
        (BrokenPipeError(32, "Broken pipe"), 2, 4),
        (RuntimeError("the data server: connection refused"), 2, 4),
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"),
            2,
            4,
        ),  # its own?
        (ValueError("no"), 2, 4),
    ],
)
def test_a_rank_that_lost_another_says_so_in_a_line_and_keeps_its_traceback(
    run: RunDirectory, error: Exception, world: int, lines: int
) -> None:
    """The one that is gone is to blame: what it said must not be buried under what followed from it."""

    def fails() -> None:
        with heart(run, rank=1, world=world):
            raise error

    with pytest.raises(type(error)) as caught:
        fails()
    printed = describe_end(caught.value, rank=1, world=world)
    assert printed.endswith("\n") and len(printed.splitlines()) >= lines
    assert ("Traceback" in printed) == (lines > 1)
    words = LastWords.model_validate(json.loads((folder_of(run, 3) / "rank-1.json").read_text()))
    assert ("in fails" in words.trace) == (lines == 1)
    assert lines > 1 or (printed.count("\n") == 1 and "rank 1 lost another rank at " in printed)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_group_that_has_no_name_yet_is_not_counted(alone: None) -> None:
    """Torch enters a new group into one table, then its name into another; a beat may come between the two."""
    group = distributed.new_group([0])
    distributed.all_reduce(torch.ones(1), group=group)
    names = distributed_c10d._world.pg_names
    before = count_collectives()
    name = names.pop(group)
    try:
        assert count_collectives() == {other: count for other, count in before.items() if other != name}
    finally:
        names[group] = name
    assert count_collectives() == before and before[name] == 1


def test_to_look_for_a_supervisor_changes_no_random_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose supervisor was replaced ends with the random states of one that was left alone."""
    slept, before = threading.Event(), random.getstate()
    monkeypatch.setattr(beats, "pause_of", lambda world: 1e-3)
    looks = iter([None] * 3)

    def read(path: Path) -> None:
        if next(looks, path) is path:
            slept.set()
            threading.Event().wait()  # this thread ends with the process

    monkeypatch.setattr(beats.Address, "read_file", read)
    Beats(tmp_path, 1, 0, "here", 1)
    assert slept.wait(PATIENCE) and random.getstate() == before


@given(st.lists(st.integers(0, 60), max_size=6, unique=True), st.integers(1, 7))
def test_blocks_are_of_the_same_steps_however_they_come(lost: list[int], at_once: int) -> None:
    steps = [(n, 1.0, (0.0, float(n), 0.0, 0.0)) for n in range(61) if n not in lost]
    blocks = WorkBlocks()
    found = [b for i in range(0, len(steps), at_once) for b in blocks.add_steps(steps[i : i + at_once])]
    for block in found:
        mine = [n for n, *_ in steps if n // STEPS == block.block]
        assert len(mine) >= ENOUGH and block.own == pytest.approx(sum(mine) / len(mine), abs=1e-6)
    whole = [b for b in range(6) if sum(n // STEPS == b for n, *_ in steps) >= ENOUGH]
    # The last one is told once a step of the next has come, or its own last step.
    assert [b.block for b in found] in (whole, whole[:-1])
