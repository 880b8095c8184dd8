"""A survey of hosts: their reports, what their clocks say, and the token in the folder that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from megastable.cluster import host_survey
from megastable.cluster.host_check import TOKEN
from megastable.cluster.host_report import HostReport
from megastable.cluster.host_survey import existing, survey
from megastable.cluster.preflight import Wanted, compare
from megastable.cluster.reach import Local
from tests.patience import PATIENCE


class Shifted:
    """Hosts whose name is the error of their clock, in seconds; one does not answer."""

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        if host == "dead":
            return ["sh", "-c", "echo ssh: connect to host dead port 22: No route to host; exit 255"]
        shift = f"import json, sys; r = json.load(sys.stdin); r['time'] += {host}; print(json.dumps(r))"
        return [
            "sh",
            "-c",
            '"$@" | "$0" -c "$SHIFT"'.replace("$SHIFT", shift),
            command[0],
            *Local().words("", command),
        ]


def test_reports_tokens_and_clocks(tmp_path: Path) -> None:
    told: list[str] = []
    found = survey(["0", "10000", "dead", "-10000"], Shifted(), tmp_path, full=False, told=told.append)
    assert found.reports["dead"] == "ssh: connect to host dead port 22: No route to host"
    reports = [found.reports[host] for host in ("0", "10000", "-10000")]
    for report in reports:
        assert isinstance(report, HostReport) and report.folder is not None, report
        assert report.folder.token == found.token
    assert sorted(told) == sorted(found.reports) and found.offsets.keys() == {"0", "10000", "-10000"}
    for host, offset in found.offsets.items():
        assert abs(offset - float(host)) < PATIENCE
    assert not (tmp_path / TOKEN).exists()


def test_each_survey_has_a_token_of_its_own(tmp_path: Path) -> None:
    """A directory that only looks the same holds at best an older one."""
    (tmp_path / TOKEN).write_text("older")
    one, two = (survey(["x"], Local(), tmp_path, full=False).token for _ in range(2))
    assert one != two and len(one) >= 16


@pytest.mark.slow
def test_a_folder_that_hangs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the token is a pipe that nobody reads: whoever opens it waits for ever."""
    os.mkfifo(tmp_path / TOKEN)
    monkeypatch.setattr(host_survey, "LOOK", 0.3)
    found = survey(["x"], Local(), tmp_path, full=False)
    assert found.token is None and "no answer within" in found.unwritten
    report = found.reports["x"]
    assert isinstance(report, HostReport) and report.folder is None


def test_a_run_directory_that_is_not_made_yet(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert existing(tmp_path) == existing(tmp_path / "a/b") == existing(tmp_path / "file/b") == tmp_path


def test_a_folder_that_cannot_be_written_is_refused_and_the_hosts_are_asked() -> None:
    """Between two attempts the disk may be full: the supervisor waits for room, and must not end for it."""
    found = survey(["x"], Local(), Path("/proc/self"), full=False)
    assert found.unwritten.startswith("/proc/self/.preflight could not be written: ")
    told = [
        one.text
        for one in compare(found.reports, Wanted(token=found.token, cpu=True))
        if one.check == "folder"
    ]
    assert len(told) == 1 and told[0].startswith("the run directory cannot be written: ")
