"""The supervisor's side of the files that it exchanges with the ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megastable.cluster.local_attempt import LocalAttempt
from megastable.run.directory import RunDirectory, as_json
from megastable.run.rank_ipc import Progress, folder_of, pause_of
from megastable.supervise import rank_files
from megastable.supervise.rank_files import RankFiles

MANY = 1500  # ranks, which look for new orders every 3 s


@pytest.mark.slow
def test_the_stacks_of_many_ranks_are_waited_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has not looked yet would count as one that does not answer."""
    monkeypatch.setattr(rank_files, "STACKS", 0.3)
    run, folder = RunDirectory(tmp_path), folder_of(RunDirectory(tmp_path), 3)
    folder.mkdir(parents=True)
    progress = Progress(attempt=3, pid=1, host="a", time=0, phase="step", world=MANY, steps=9)
    run.progress.write_text(as_json(progress.model_dump()))
    late = threading.Timer(pause_of(MANY) - 0.4, (folder / "rank-7.stacks").touch)
    late.start()
    found, mute = RankFiles(run, print).stacks(LocalAttempt(run, 3))
    late.join()
    assert [Path(path).name for path in found] == ["rank-7.stacks"] and not mute


def test_the_next_supervisor_knows_why_the_ranks_were_asked_to_stop(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = RankFiles(run, print)
    first.only(4)
    first.want(stop=True, again="3 hosts can take part")
    taken = RankFiles(run, print).adopt(4)
    assert (taken.stop, taken.again) == (True, "3 hosts can take part")
    first.only(5)
    assert RankFiles(run, print).adopt(5).again == ""
