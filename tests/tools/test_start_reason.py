"""Why a run goes on with another recipe is asked where somebody can answer, and nowhere else."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megastable.base.errors import STOPPED, ConfigError
from megastable.base.login import login_name
from megastable.commands.root import app
from megastable.commands.start_reason import note_reason
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import Note
from megastable.supervise.gathering import RunExit
from megastable.supervise.locks import only_supervisor
from megastable.supervise.supervisor import Supervisor
from tests.conftest import tiny
from tests.tools.cli import call


def started(root: Path) -> RunDirectory:
    root.mkdir()
    run = RunDirectory(root)
    run.freeze(tiny(root / "corpus", root), [], {})
    return run


def changed(root: Path) -> RunConfig:
    return tiny(root / "corpus", root, optimizer={"lr": 1e-3})


def notes(run: RunDirectory) -> list[str | None]:
    return [event.text for event in run.events(Note)]


def test_a_given_reason_is_journaled_if_the_recipe_has_changed(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    note_reason(tiny(run.root / "corpus", run.root), "nothing has changed")
    assert notes(run) == []
    note_reason(changed(run.root), None)  # nobody is there to be asked
    assert notes(run) == []
    note_reason(changed(run.root), " the loss\nswings ")
    assert notes(run) == ["the recipe changes (optimizer.lr: 0.003 -> 0.001): the loss swings"]
    [event] = run.events(Note)
    assert event.who == login_name()
    note_reason(tiny(tmp_path / "corpus", tmp_path / "new"), "a new run")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="another run"):
        note_reason(tiny(run.root / "corpus", run.root, model={"layers": 3}), "other weights")


def test_where_others_are_at_work_nothing_is_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is refused has not changed the run's recipe."""
    run = started(tmp_path / "run")
    recipe = tmp_path / "changed.yaml"
    recipe.write_text(yaml.safe_dump(changed(run.root).model_dump(mode="json")))
    monkeypatch.setattr("megastable.base.spared_output.spare_output", lambda: None)
    with only_supervisor(run, "here"):
        note_reason(changed(run.root), "the loss swings")
        done = call(app, "supervise", recipe, "--reason", "the loss swings", cwd=tmp_path)
    assert done.returncode == 2 and "another supervisor" in done.stderr, done
    run.lock()
    note_reason(changed(run.root), "the loss swings")
    assert notes(run) == []


def test_a_supervisor_journals_the_reason_once_the_run_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(tmp_path / "run")
    recipe = tmp_path / "changed.yaml"
    recipe.write_text(yaml.safe_dump(changed(run.root).model_dump(mode="json")))
    monkeypatch.setattr("megastable.base.spared_output.spare_output", lambda: None)
    monkeypatch.setattr(Supervisor, "_until_the_end", lambda *_: RunExit(STOPPED, "stopped"))
    before = signal.getsignal(signal.SIGHUP)
    try:
        done = call(app, "supervise", recipe, "--reason", "the loss swings", cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.returncode == STOPPED, done
    assert [event.event for event in run.events()] == ["note", "supervisor", "supervisor"]
    assert notes(run) == ["the recipe changes (optimizer.lr: 0.003 -> 0.001): the loss swings"]


# A session on the terminal that is its standard input, as a shell's: the program is a job in front, or in the
# background, as with "&". The exit code says how it ended, 99 that it was stopped.
SHELL = """
import fcntl, os, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
front, *words = sys.argv[1:]
if front == "True":
    os.execv(words[0], words)
job = subprocess.Popen(words, process_group=0)
_, how = os.waitpid(job.pid, os.WUNTRACED)
job.kill()
sys.exit(99 if os.WIFSTOPPED(how) else os.waitstatus_to_exitcode(how))
"""


@pytest.mark.parametrize(
    ("typed", "front", "wanted"),
    [
        ("the loss swings\n", True, True),
        ("\n", True, False),
        (None, True, False),
        ("ls\n", False, False),
    ],
)
def test_it_is_asked_on_a_terminal_and_an_empty_one_holds_nobody_up(
    typed: str | None, front: bool, wanted: bool, tmp_path: Path
) -> None:
    run = started(tmp_path / "run")
    recipe = tmp_path / "changed.yaml"
    recipe.write_text(yaml.safe_dump(changed(run.root).model_dump(mode="json")))
    code = (
        "import sys; from megastable.commands import start_reason; from megastable.config.recipe import load; "
        f"start_reason.PATIENCE = {60.0 if typed else 0.2}; start_reason.note_reason(load(sys.argv[1]), None)"
    )
    words = [sys.executable, "-c", SHELL, str(front), sys.executable, "-c", code, str(recipe)]
    ours, theirs = pty.openpty()
    try:
        if not front:  # for the shell
            os.write(ours, typed.encode() if typed else b"")
        process = subprocess.Popen(words, stdin=theirs, stdout=theirs, start_new_session=True)
        said, until = b"", time.monotonic() + 60
        while front and b"Why?" not in said and time.monotonic() < until:
            said += os.read(ours, 1000)
        if front and typed:
            os.write(ours, typed.encode())
        assert process.wait(60) == 0
    finally:
        os.close(ours)
        os.close(theirs)
    assert b"optimizer.lr: 0.003 -> 0.001" in said or not front
    text = "the recipe changes (optimizer.lr: 0.003 -> 0.001): the loss swings"
    assert notes(run) == ([text] if wanted else [])
