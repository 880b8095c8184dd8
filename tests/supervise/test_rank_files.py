"""The supervisor's side of the files that it exchanges with the ranks, and whether their file system answers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megastable.run.directory import RunDirectory
from megastable.supervise import rank_files
from megastable.supervise.rank_files import RankFiles, StorageProbe
from tests.patience import until

MANY = 1500  # ranks, which look for new orders every 3 s


def test_adopt_knows_why_the_ranks_were_asked_to_stop(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    first = RankFiles(run, print)
    first.allow_only_attempt(4)
    first.tell_ranks(stop=True, again="3 hosts can take part")
    taken = RankFiles(run, print).adopt_control(4)
    assert (taken.stop, taken.again) == (True, "3 hosts can take part")
    first.allow_only_attempt(5)
    assert RankFiles(run, print).adopt_control(5).again == ""


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/probe"])
def test_storage_probe_takes_a_write_that_fails_for_one_that_came_back(path: str) -> None:
    assert StorageProbe(Path(path)).stalled_seconds() is None


def test_storage_probe_tells_a_write_that_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody reads stalls whoever opens it to write, also without root."""
    monkeypatch.setattr(rank_files, "ANSWERS", 0.3)
    os.mkfifo(tmp_path / "probe")

    def writers() -> int:
        return sum(thread.name == "storage" for thread in threading.enumerate())

    before, probe = writers(), StorageProbe(tmp_path / "probe")
    first = probe.stalled_seconds()
    assert first is not None and first >= 0.3
    second = probe.stalled_seconds()
    assert second is not None and second > first
    assert writers() == before + 1  # the same write: a stall of hours must not become thousands of threads
    reader = os.open(tmp_path / "probe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        until(lambda: probe.stalled_seconds() is None)
    finally:
        os.close(reader)
    assert writers() == before
