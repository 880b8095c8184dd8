"""Whole trainings by launch/slurm.sbatch on a real Slurm, and what they survive."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megastable.base import errors
from megastable.config.tree import RunConfig
from megastable.data.plant import Planted, plant
from megastable.run import records
from megastable.run.directory import read_object
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.supervisor_events import Ended
from tests.conftest import tiny, write_corpus
from tests.launch.slurm_cluster import SlurmCluster, missing
from tests.launch.slurm_runs import SlurmRun, checkout

pytestmark = pytest.mark.slow
STEPS = 300
FIRST_BAD = 31


def config(corpus: Path, run: Path) -> RunConfig:
    return tiny(
        corpus, run,
        model={"layers": 1},
        train={"steps": STEPS, "global_batch": 8, "micro_batch": 4, "eval_samples": 8},
        optimizer={"lr": 1e-2},
        schedule={"warmup_steps": 10, "total_steps": STEPS},
        checkpoint={"interval": 25, "keep": 2},
        stability={"detector": {"warmup_steps": 20, "min_values": 12}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    """Of a run on a corpus with noise in its steps 31 to 33."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("data")
    clean, bad = folder / "clean", folder / "bad"
    write_corpus(clean, ids=20)
    (clean / "tokenizer.model").write_bytes(b"")  # copied along, never read
    planted, _ = plant(clean, bad, config(clean, folder / "run"), step=FIRST_BAD, samples=20)
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(config(bad, folder / "run").model_dump(mode="json")))
    return file, planted


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    if reason := missing():
        pytest.skip(reason)
    with SlurmCluster(tmp_path / "slurm", nodes=3, gpus=1) as cluster:
        yield cluster


def closed(job: SlurmRun) -> list[dict[str, object]]:
    return [e["summary"] for e in job.events(IncidentEvent) if e["what"] == "closed"]


def complete(job: SlurmRun, steps: int) -> None:
    """One job, which Slurm saw end well, and a run without a gap."""
    facts = job.job()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.said()
    assert read_object(job.run.summary)["steps"] == steps
    assert records.read(job.run.root / "steps").column("step").to_pylist() == list(range(1, steps + 1))
    assert (job.run.root / f"checkpoints/step-{steps}").is_dir()


def test_a_spike_a_killed_rank_and_a_preemption(
    cluster: SlurmCluster, recipe: tuple[Path, Planted], tmp_path: Path
) -> None:
    file, planted = recipe
    job = SlurmRun(cluster, checkout(tmp_path / "repository"), file)
    job.until("a first step", lambda: job.step(1) > 0)
    job.until("the spike is healed", lambda: bool(closed(job)))
    job.until("step 60", lambda: job.step(1) >= 60)
    job.rank("n2").send_signal(signal.SIGKILL)
    job.tell("the rank on n2 is killed")
    job.until("step 120, after its restart", lambda: job.step(2) >= 120)
    assert job.job()["Restarts"] == "0"
    cluster.run("scancel", "--signal=TERM", "--batch", str(job.number))
    job.tell("scancel --signal=TERM --batch")
    job.until("requeued", lambda: job.job()["Restarts"] == "1")
    job.until("a step after it", lambda: job.step(3) > 0)
    job.until("the job is over", lambda: job.job()["JobState"] == "COMPLETED")

    complete(job, STEPS)
    assert cluster.run("scontrol", "show", "job", "--oneliner").count("JobId=") == 1
    spike, crash = closed(job)
    assert (spike["verdict"], spike["cause"], spike["outcome"]) == ("spike", "data", "healed")
    assert [tuple(r) for r in spike["positions"]] == planted.positions
    assert (crash["verdict"], crash["cause"], crash["outcome"]) == ("crash", "process", "healed")
    ends = list(job.events(Ended))
    assert [end["code"] for end in ends] == [None, errors.STOPPED, errors.OK]
    # The signal is known only if the agent looks before the launcher does.
    assert (ends[0]["rank"], ends[0]["host"]) == (1, "n2") and ends[0]["signal"] in (signal.SIGKILL, None)
    said = [line for line in job.said().splitlines() if line.startswith(("exit code", "requeueing"))]
    assert said == [
        "exit code 75: stopped with a checkpoint",
        f"requeueing job {job.number}",
        "exit code 0: the run is complete",
    ]


@pytest.mark.parametrize(
    ("lost", "after"), [("n1", "n[2-3]"), ("n2", "n[1,3]")], ids=["the-first", "another"]
)
def test_a_lost_node(
    cluster: SlurmCluster, recipe: tuple[Path, Planted], tmp_path: Path, lost: str, after: str
) -> None:
    """Slurm requeues the job with a spare node in its place, also if it was the supervisor's."""
    job = SlurmRun(cluster, checkout(tmp_path / "repository"), recipe[0], "train.steps=120")
    job.until("step 60", lambda: job.step(1) >= 60)
    assert job.job()["NodeList"] == "n[1-2]"
    cluster.lose(lost)
    job.tell(f"{lost} is lost")
    job.until("requeued", lambda: job.job()["Restarts"] == "1")
    job.until("a step after it", lambda: job.step(2) > 0)
    assert job.job()["NodeList"] == after
    job.until("the job is over", lambda: job.job()["JobState"] == "COMPLETED")
    complete(job, 120)


def test_a_job_of_higher_priority(
    cluster: SlurmCluster, recipe: tuple[Path, Planted], tmp_path: Path
) -> None:
    """Slurm tells the agents, and requeues the job when its grace is over, or the script does before."""
    job = SlurmRun(cluster, checkout(tmp_path / "repository"), recipe[0])
    job.until("step 60", lambda: job.step(1) >= 60)
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=hostname", cwd=tmp_path)
    job.tell("a job of higher priority needs the nodes")
    job.until("requeued", lambda: job.job()["Restarts"] == "1")
    job.until("a step after it", lambda: job.step(2) > 0)
    assert cluster.job(urgent)["JobState"] == "COMPLETED"
    job.until("the job is over", lambda: job.job()["JobState"] == "COMPLETED")
    complete(job, STEPS)
    assert "stopping: the agent on n" in job.said()
