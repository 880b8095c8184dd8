"""Training across two hosts, by hostfile, ssh and pdsh, equals training on one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megastable.cluster.launcher import LAUNCHER
from megastable.run import records
from tests.distributed import run_main
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
TWO_HOSTS = Path(__file__).with_name("two_hosts.sh")
STEPS = 6
# What `two_hosts.sh` does with namespaces, the network in them and mounts, and nothing else.
TRIAL = (
    "ip link add try0 type bridge && ip link add try1 type veth peer name try2 && mount -t tmpfs tmpfs /run"
)


def missing() -> str | None:
    """Why two hosts cannot be made here, if so."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    absent = [
        tool for tool in "unshare setpriv ip ssh ssh-keygen sshd pdsh".split() if not shutil.which(tool)
    ]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian: apt-get install iproute2 openssh-server pdsh)"
    unshare = "unshare --mount --net --pid --ipc --uts --fork --mount-proc".split()
    trial = subprocess.run([*unshare, "sh", "-c", TRIAL], capture_output=True, text=True, timeout=PATIENCE)
    return f"namespaces may not be made here: {trial.stderr.strip()}" if trial.returncode else None


def arguments(corpus: Path, run: Path) -> list[str]:
    overrides = (
        "model.layers=2 model.hidden=64 model.heads=2 model.kv_heads=1 model.ffn=128 model.sequence_length=64 "
        f"train.steps={STEPS} train.global_batch=8 train.micro_batch=2 train.eval_interval=0 train.eval_samples=8 "
        f"checkpoint.interval=0 logging.tensorboard=false logging.peak_tflops=1 run.dir={run}"
    ).split()
    recipe = str(ROOT / "launch/recipes/quickstart.yaml")
    return [recipe, *overrides, f"data.corpora=[{{path: {corpus}}}]"]


def train(*command: str | Path) -> str:
    """What it printed. Fails with all of it unless it ends with 0."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=PATIENCE, text=True, capture_output=True
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def measured(run: Path) -> dict[str, list[float]]:
    table = records.read(run / "steps")
    return {
        name: table.column(name).to_pylist() for name in ("step", "loss", "z_loss", "grad_norm", "worst_loss")
    }


@pytest.mark.slow
def test_two_hosts_train_what_one_does(corpus: Path, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    launcher = [*LAUNCHER, "--hostfile", hosts / "hostfile", "--module", "megastable.train"]
    printed = train("bash", TWO_HOSTS, hosts, *launcher, *arguments(corpus, tmp_path / "across"))
    done = run_main(2, tmp_path / "said", *arguments(corpus, tmp_path / "single"))
    assert done.code == 0, done

    summary = json.loads((tmp_path / "across" / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["data"]) == (STEPS, 2, 2)
    for node, address in enumerate(("10.77.0.1", "10.77.0.2")):
        said = [line for line in printed.splitlines() if line.startswith(f"{address}: ")]
        assert sum(f"nnodes=2, num_local_procs=1, node_rank={node}" in line for line in said) == 1, printed
        assert sum("exits successfully" in line for line in said) == 1, printed

    # Gradients went over the wire in both directions, every step, in no less than two bytes a parameter.
    received = dict(line.split() for line in (hosts / "received").read_text().splitlines())
    assert received.keys() == {"first", "second"}
    assert min(map(int, received.values())) > 2 * summary["parameters"] * STEPS

    assert len(measured(tmp_path / "across")["step"]) == STEPS
    assert measured(tmp_path / "across") == measured(tmp_path / "single")
    single = json.loads((tmp_path / "single" / "summary.json").read_text())
    assert summary["val_loss"] == single["val_loss"]
