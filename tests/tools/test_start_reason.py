"""Why a run goes on with another recipe is asked where somebody can answer, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megastable.base.errors import ConfigError
from megastable.base.process import login_name
from megastable.commands.options import note_reason
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import Note
from tests.conftest import tiny


def started(root: Path) -> RunDirectory:
    root.mkdir()
    run = RunDirectory(root)
    run.freeze_recipe(tiny(root / "corpus", root), [], {})
    return run


def changed(root: Path) -> RunConfig:
    return tiny(root / "corpus", root, optimizer={"lr": 1e-3})


def notes(run: RunDirectory) -> list[str | None]:
    return [event.text for event in run.iterate_events(Note)]


def test_a_given_reason_is_journaled_if_the_recipe_has_changed(tmp_path: Path) -> None:
    run = started(tmp_path / "run")
    note_reason(tiny(run.root / "corpus", run.root), "nothing has changed")
    assert notes(run) == []
    note_reason(changed(run.root), None)  # nobody is there to be asked
    assert notes(run) == []
    note_reason(changed(run.root), " the loss\nswings ")
    assert notes(run) == ["the recipe changes (optimizer.lr: 0.003 -> 0.001): the loss swings"]
    [event] = run.iterate_events(Note)
    assert event.who == login_name()
    note_reason(tiny(tmp_path / "corpus", tmp_path / "new"), "a new run")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="another run"):
        note_reason(tiny(run.root / "corpus", run.root, model={"layers": 3}), "other weights")


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
        "import sys; from megastable.commands import options; from megastable.config.recipe import load_recipe; "
        f"options.PATIENCE = {60.0 if typed else 0.2}; options.note_reason(load_recipe(sys.argv[1]), None)"
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
