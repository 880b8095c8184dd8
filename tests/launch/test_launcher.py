"""Through the deepspeed launcher, as a user starts it: several layouts, bad input, leftovers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from megastable.cluster.launcher import LAUNCHER, find_free_port
from tests.distributed import run_main
from tests.patience import PATIENCE
from tests.training.tracked_run import all_told

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "launch/recipes/quickstart.yaml")
TINY = (
    "model.layers=2 model.hidden=64 model.heads=2 model.kv_heads=2 model.ffn=128 model.sequence_length=64 "
    "train.steps=3 train.global_batch=8 train.micro_batch=2 train.eval_interval=0 train.eval_samples=8 "
    "checkpoint.interval=0 logging.trackers=[tensorboard] logging.peak_tflops=1 schedule.warmup_steps=1"
).split()


@pytest.mark.slow
def test_launcher_trains_tensor_and_pipeline_parallel_on_four_ranks(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = f"data.corpora=[{{path: {corpus}}}]"
    ports = ["--num_gpus", "4", "--master_port", str(find_free_port())]
    layout = ["parallel.tensor=2", "parallel.pipeline=2", f"run.dir={run}"]
    words = [*LAUNCHER, *ports, "--module", "megastable.train", QUICKSTART, *TINY, data, *layout]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, timeout=PATIENCE, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["tensor"], summary["pipeline"], summary["steps"]) == (4, 2, 2, 3)
    assert summary["final_loss"] < summary["first_loss"]
    assert "tensor 2 x pipeline 2 x data 1" in done.stdout
    all_told(run)
    assert len(list((run / "tensorboard/run").glob("events*"))) == 1  # of one rank
    assert (run / "checkpoints/latest").read_text() == "step-3"


@pytest.mark.quick("2-model.layer=3-model.layer: unknown key; did you mean model.layers[?]")
@pytest.mark.parametrize(
    ("ranks", "override", "message"),
    [
        (2, "model.layer=3", "model.layer: unknown key; did you mean model.layers?"),
        (3, "parallel.tensor=2", "3 ranks cannot be laid out as parallel.tensor=2 x parallel.pipeline=1"),
        (2, "data.corpora=[{path: no/such/corpus}]", "is not a prepared corpus"),
    ],
)
def test_train_tells_bad_input_once_without_a_traceback(
    ranks: int, override: str, message: str, tmp_path: Path
) -> None:
    done = run_main(ranks, tmp_path / "said", QUICKSTART, *TINY, f"run.dir={tmp_path / 'run'}", override)
    assert (done.code, done.stderr.count(message)) == (2, 1)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("mark", "code"), [([], 2), (["--supervised=1@run"], 1)])
def test_train_tells_a_port_in_use_with_the_remedy(mark: list[str], code: int, tmp_path: Path) -> None:
    """Bad input, unless a supervisor chose the port: it starts again with another one."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = f"run.dir={tmp_path / 'run'}"
        done = run_main(1, tmp_path / "said", QUICKSTART, *TINY, run, *mark, port=port)
    assert done.code == code and "--master_port" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
