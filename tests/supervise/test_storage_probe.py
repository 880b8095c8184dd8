"""Whether a file system answers: found out without waiting for it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from drills.hosts import Hosts
from drills.namespaces import missing
from megastable.supervise.rank_files import StorageProbe
from tests.patience import PATIENCE

SOON = 0.3  # seconds


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megastable.supervise.rank_files.ANSWERS", SOON)


def writers() -> int:
    return sum(thread.name == "storage" for thread in threading.enumerate())


def until_it_answers(probe: StorageProbe) -> None:
    end = time.monotonic() + PATIENCE
    while probe.stalled() is not None:
        assert time.monotonic() < end


def test_a_directory_that_answers(tmp_path: Path) -> None:
    probe = StorageProbe(tmp_path / "probe")
    assert probe.stalled() is None is probe.stalled()
    assert float((tmp_path / "probe").read_text()) <= time.time()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/probe"])
def test_a_write_that_fails_has_come_back(path: str) -> None:
    assert StorageProbe(Path(path)).stalled() is None


def test_a_write_that_does_not_come_back(tmp_path: Path) -> None:
    """A pipe that nobody reads stalls whoever opens it to write, also without root."""
    os.mkfifo(tmp_path / "probe")
    before, probe = writers(), StorageProbe(tmp_path / "probe")
    first = probe.stalled()
    assert first is not None and first >= SOON
    begin = time.monotonic()
    second = probe.stalled()
    assert time.monotonic() - begin < SOON  # it has waited long enough for this write
    assert second is not None and second > first
    assert writers() == before + 1  # the same write: a stall of hours must not become thousands of threads
    reader = os.open(tmp_path / "probe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        until_it_answers(probe)
    finally:
        os.close(reader)
    assert writers() == before


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_frozen_file_system(tmp_path: Path) -> None:
    (tmp_path / "hosts").mkdir()
    with Hosts(tmp_path / "hosts", 1, 64 << 20) as hosts:
        if hosts.shared.cannot_freeze is not None:
            pytest.skip(hosts.shared.cannot_freeze)
        probe = StorageProbe(hosts.shared.outside / "probe")
        assert probe.stalled() is None
        hosts.shared.freeze()
        try:
            stalled = probe.stalled()
        finally:
            hosts.shared.thaw()
        assert stalled is not None and stalled >= SOON
        until_it_answers(probe)
