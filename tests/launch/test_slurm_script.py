"""What launch/slurm.sbatch does with a signal and an exit code: the script and its supervisor, with Slurm's answers
given. On a real Slurm: test_slurm.py, test_slurm_run.py."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from megastable.base import errors
from megastable.cluster.slurm_job import blamed
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.supervisor_events import Ended, SupervisorEvent
from megastable.run.events.training_events import Stopped
from megastable.run.log import RunLog
from tests.conftest import tiny
from tests.launch.slurm_runs import checkout
from tests.patience import PATIENCE

STEPS = 300
# Answers as Slurm 22.05 does, and writes down what it is asked to change.
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") echo alone ;;
  "show job") echo "JobId=5 JobState=$(cat {folder}/state) EndTime=Unknown ExcNodeList=(null) NodeList=alone" ;;
  *) echo "$*" >> {folder}/asked ;;
esac
"""
SQUEUE = """#!/bin/sh
echo "$*" >> {folder}/squeue
cat {folder}/state
"""
SRUN = "#!/bin/sh\nexit 1\n"  # no step starts


class Slurm:
    """The script as a job on this host. state: of the job, as Slurm tells it."""

    def __init__(self, folder: Path, state: str = "RUNNING") -> None:
        self.folder = checkout(folder)
        for name, text in {"scontrol": SCONTROL, "squeue": SQUEUE, "srun": SRUN}.items():
            (folder / name).write_text(text.format(folder=folder))
            (folder / name).chmod(0o755)
        (folder / "state").write_text(f"{state}\n")

    def environment(self) -> dict[str, str]:
        job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "alone", "SLURM_GPUS_ON_NODE": "1"}
        return {**os.environ, **job, "PATH": f"{self.folder}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*map(str, words)], cwd=self.folder, env=self.environment(), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def heard(self) -> int:
        """How often the script has asked for the job's state, as it does at every signal."""
        file = self.folder / "squeue"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def asked(self) -> list[str]:
        """What Slurm was asked to change."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.mark.quick("0-*", "75-*")
@pytest.mark.parametrize(
    ("code", "asked"),
    [
        (errors.OK, []),
        (errors.STOPPED, ["requeue 5"]),
        (errors.HOST_GONE, ["requeue 5", "update JobId=5 ExcNodeList=alone"]),
        (errors.UNSTABLE, []),
        (errors.FAILED, []),
        (128 + signal.SIGKILL, []),
    ],
)
def test_an_exit_code_becomes_a_decision_and_stays_the_jobs(
    tmp_path: Path, code: int, asked: list[str]
) -> None:
    slurm = Slurm(tmp_path)
    process = slurm.start(".venv/bin/python", "-m", "megastable.cluster.slurm_job", "ended", str(code))
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, said
    assert said.startswith(f"exit code {code}: ")
    assert slurm.asked() == asked


@pytest.mark.slow
def test_a_host_that_failed_too_often_is_left_out_though_it_answers(tmp_path: Path) -> None:
    """Else the requeued job gets it again, and again ends for it, for as long as nobody looks."""
    slurm, run = Slurm(tmp_path), RunDirectory(tmp_path / "a run")
    (slurm.folder / "srun").write_text("#!/bin/sh\nexit 0\n")  # every step starts
    run.root.mkdir()
    log = RunLog(run, print)

    def asked(reason: str, host: str) -> list[str]:
        log.emit(Ended(attempt=3, what="SIGKILL", host=host))
        log.emit(SupervisorEvent(what="ended", pid=1, host="x", code=errors.HOST_GONE, reason=reason))
        (slurm.folder / "asked").unlink(missing_ok=True)
        words = ("-m", "megastable.cluster.slurm_job", "ended", errors.HOST_GONE, f"run.dir={run.root}")
        said, _ = slurm.start(".venv/bin/python", *map(str, words)).communicate(timeout=PATIENCE)
        assert said.startswith("exit code 80: ")
        return slurm.asked()

    excluded = ["requeue 5", "update JobId=5 ExcNodeList=alone"]
    assert asked("3 failures of alone within 1000 steps: that host is faulty", "alone") == excluded
    assert asked("other did not come within 9 s", "alone") == ["requeue 5"]
    assert asked("alone-2 did not come within 9 s", "alone") == ["requeue 5"]
    led = SupervisorEvent(
        what="ended", pid=1, host="x", code=errors.UNSTABLE, reason="the last one was on alone"
    )
    started = SupervisorEvent(what="started", pid=2, host="x")  # a person mended it
    for later in (led, started):
        log.emit(Ended(attempt=4, what="SIGKILL", host="alone"))
        log.emit(SupervisorEvent(what="ended", pid=1, host="x", code=errors.HOST_GONE, reason="of alone"))
        assert blamed(run.root) == ["alone"]
        log.emit(later)
        assert blamed(run.root) == []
    assert blamed(tmp_path / "none") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "signals", "code", "asked"),
    [("RUNNING", 1, errors.STOPPED, ["requeue 5"]), ("COMPLETING", 2, errors.OK, [])],
)
def test_a_signal_is_passed_on_unless_slurm_has_sent_it_to_all(
    corpus: Path, tmp_path: Path, state: str, signals: int, code: int, asked: list[str]
) -> None:
    """A second signal would end the supervisor at once. The script waits for it, however many it gets itself."""
    recipe = tmp_path / "recipe.yaml"
    config = tiny(corpus, tmp_path / "run", train={"steps": STEPS}, schedule={"total_steps": STEPS})
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    slurm, run = Slurm(tmp_path / "job", state), RunDirectory(tmp_path / "run")
    process = slurm.start("bash", "launch/slurm.sbatch", recipe, f"run.dir={run.root}")
    try:
        end = time.monotonic() + PATIENCE
        while not read_object(run.progress).get("step"):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        for count in range(1, signals + 1):
            process.send_signal(signal.SIGTERM)
            while slurm.heard() < count:
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.02)
            time.sleep(0.3)  # the script waits again
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, said
    assert f"exit code {code}: " in said
    assert slurm.asked() == asked
    assert len(list(run.events(Stopped))) == (code == errors.STOPPED)
