"""What a record is made of is never beside the folder that is online, where a killed command would leave it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.report.publish import publish
from megastable.report.publish.redaction import Keeping

# The command, killed when it has made everything, and not searched it yet.
KILLED = """
import os, signal, sys
from pathlib import Path
from megastable.report import publish
from megastable.report.publish.redaction import Keeping
publish.find_leaks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
publish.publish(Path(sys.argv[1]), Path(sys.argv[2]), Keeping())
"""


@pytest.mark.slow
def test_a_killed_command_leaves_no_link_into_the_run(spike: Path, tmp_path: Path) -> None:
    (spike / "checkpoints" / "step-10").mkdir(parents=True)
    (tmp_path / "online").mkdir()
    (tmp_path / "private").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, spike, tmp_path / "online" / "run"], capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "private")},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "online").iterdir()) == []
    (made,) = (tmp_path / "private").iterdir()  # only for this user
    assert made.stat().st_mode & 0o077 == 0
    assert any(path.is_symlink() for path in made.rglob("*"))
    publish(spike, tmp_path / "online" / "run", Keeping())
    assert [path.name for path in (tmp_path / "online").iterdir()] == ["run"]


@pytest.mark.slow
def test_without_room_for_temporary_files_the_message_says_where(
    spike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DataError, match=f"{tempfile.gettempdir()}.*No space left"):
        publish(spike, tmp_path / "public", Keeping())
    assert not [path.name for path in tmp_path.iterdir() if "public" in path.name]
