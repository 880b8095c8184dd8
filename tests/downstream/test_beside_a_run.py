"""The evaluation of checkpoints alongside a supervised run: where scores arrive, and what kills and restarts do."""

from __future__ import annotations

import json
import shlex
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megastable.base import errors
from megastable.cluster.launcher import find_free_port
from megastable.config.tree import RunConfig
from megastable.report.run_page.page_file import write_page
from megastable.supervise.standing import State
from megastable.supervise.status import read_status
from tests.convert.huggingface.conftest import text_corpus, tokenizer
from tests.downstream.complete_run import settings
from tests.downstream.test_evaluator import gone
from tests.patience import PATIENCE, until
from tests.supervise.test_supervisor import Supervised

__all__ = ["text_corpus", "tokenizer"]  # fixtures
# Reads the weights, says that it is there, and waits for leave to end.
PROGRAM = """
import json, os, pathlib, socket, sys, time
from safetensors.numpy import load_file
model, results, step, notes = sys.argv[1:]
(weights,) = pathlib.Path(model).glob("*.safetensors")
found = {"tensors": len(load_file(weights)), "step": int(step)}
(pathlib.Path(notes) / f"at-{step}-{os.getpid()}-{socket.gethostname()}").touch()
while not (pathlib.Path(notes) / f"go-{step}").exists():
    time.sleep(0.05)
json.dump({"weights": found}, open(results, "w"))
"""


def evaluated_by(notes: Path) -> dict[str, Any]:
    """Settings of `PROGRAM`, which writes and waits for notes in that folder."""
    words = [sys.executable, "-c", PROGRAM, "{model}", "{results}", "{step}", str(notes)]
    return {"command": shlex.join(words), "interval": 2, "dtype": "fp32"}


class Watched(Supervised):
    """A supervised run of one rank whose checkpoints are evaluated by `PROGRAM`."""

    def __init__(self, config: RunConfig, folder: Path, **supervise: Any) -> None:
        super().__init__(config, folder, config.train.steps)
        self.folder = folder
        tree = yaml.safe_load(self.recipe.read_text())
        tree["supervise"] |= supervise
        tree["eval"] |= evaluated_by(folder)
        tree["logging"]["trackers"] = ["jsonl", "tensorboard"]
        self.recipe.write_text(yaml.safe_dump(tree))

    def command(self, *more: str) -> list[str]:
        return [*super().command(*more)[:-1], "1"]

    def program(self) -> tuple[int, int]:
        """(step, pid) of the program that waits, as soon as one does."""

        def waits() -> tuple[int, int] | None:
            for path in self.folder.glob("at-*"):
                step, pid = map(int, path.name.split("-")[1:3])
                if not gone(pid) and not (self.folder / f"go-{step}").exists():
                    return step, pid
            return None

        found: tuple[int, int] = self.until(waits)
        return found

    def first(self) -> tuple[int, int]:
        """The first of these. The training is stopped until it waits: it could be at its end before anything is
        exported."""
        self.until(lambda: self.events("checkpoint"))
        (rank,) = self.ranks().values()
        rank.suspend()
        found = self.program()
        rank.resume()
        return found

    def let(self, step: int) -> None:
        """Let the program end that evaluates this step."""
        (self.folder / f"go-{step}").touch()

    def evaluated(self) -> list[int]:
        """The steps of the checkpoints with scores, one by one."""
        events = self.events("tasks_evaluated")
        for event in events:
            assert event["scores"] == {"weights/step": event["of_step"], "weights/tensors": 25.0}
        return [event["of_step"] for event in events]

    def tracked(self) -> list[int]:
        """Steps whose scores a tracker was told."""
        rows = map(json.loads, (self.run.root / "trackers/records.jsonl").read_text().splitlines())
        tasks = [row for row in rows if row["record"] == "tasks"]
        return [row["step"] for row in tasks if row["tasks/weights/step"] == row["step"]]

    def gone(self, program: int) -> None:
        """Wait until the program and the process that started it have ended."""

        name = "megastable_tools.downstream.evaluator"
        evaluators = [p.pid for p in self.everything() if name in command_of(p)]
        until(lambda: all(map(gone, [program, *evaluators])))


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        return str(answer.read().decode())


@pytest.mark.slow
@pytest.mark.timeout(9 * PATIENCE)  # for each wait of the test
def test_evaluator_tells_scores_everywhere_and_a_killed_supervisor_loses_none(
    text_corpus: Path, tmp_path: Path
) -> None:
    steps, port = 60, find_free_port()
    config = settings(text_corpus, tmp_path / "run", steps, batch=32)
    s = Watched(config, tmp_path, metrics_port=port, hang_floor=PATIENCE)
    try:
        s.start()
        first, _ = s.first()
        assert first < steps
        s.until(lambda: s.events("finished"))  # a program that does not end holds nothing up
        s.let(first)
        assert s.program()[0] == steps
        assert s.evaluated() == [first]
        s.until(lambda: f'megastable_task_score{{run="run",task="weights/step"}} {first}.0' in scraped(port))
        status = read_status(s.run.root)
        assert status.tasks.step == first
        assert status.tasks.scores == {"weights/step": first, "weights/tensors": 25.0}
        assert status.state is State.FINISHED
        s.until(lambda: s.events("ended"))

        _, program = s.program()
        assert s.process is not None
        s.kill(s.process)
        s.process.wait()
        s.gone(program)
        s.start()
        assert s.program()[0] == steps
        status = read_status(s.run.root)
        assert status.state is State.FINISHED and "the evaluation of the last checkpoint" in status.reason
        s.let(steps)
        assert s.finish() == errors.OK, s.output.read_text()
        assert s.evaluated() == s.tracked() == [first, steps]
        assert len(s.events("launched")) == 1
        write_page([s.run.root], tmp_path / "page.html")
        assert "weights/tensors" in (tmp_path / "page.html").read_text()
    finally:
        s.end()
