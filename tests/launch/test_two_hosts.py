"""Training across two hosts, by hostfile, ssh and pdsh, equals training on one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from drills.hosts import Host, Hosts
from drills.namespaces import find_missing
from megastable.cluster.launcher import LAUNCHER
from megastable.run import records
from tests.distributed import run_main
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


def count_received(host: Host) -> int:
    """Bytes that have come in over its eth0 since it was switched on."""
    lines = Path(f"/proc/{host.pid}/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == "eth0:")


def arguments(corpus: Path, run: Path) -> list[str]:
    overrides = (
        "model.layers=2 model.hidden=64 model.heads=2 model.kv_heads=1 model.ffn=128 model.sequence_length=64 "
        f"train.steps={STEPS} train.global_batch=8 train.micro_batch=2 train.eval_interval=0 train.eval_samples=8 "
        f"checkpoint.interval=0 logging.trackers=[] logging.peak_tflops=1 run.dir={run}"
    ).split()
    recipe = str(ROOT / "launch/recipes/quickstart.yaml")
    return [recipe, *overrides, f"data.corpora=[{{path: {corpus}}}]"]


def measured(run: Path) -> dict[str, list[float]]:
    table = records.read_newest_records(run / "steps")
    return {
        name: table.column(name).to_pylist() for name in ("step", "loss", "z_loss", "grad_norm", "worst_loss")
    }


@pytest.mark.slow
@pytest.mark.skipif(find_missing() is not None, reason=str(find_missing()))
@pytest.mark.skipif(not shutil.which("pdsh"), reason="not installed: pdsh (Debian: apt-get install pdsh)")
def test_launcher_on_two_hosts_trains_what_one_does(corpus: Path, tmp_path: Path) -> None:
    variables = tmp_path / ".deepspeed_env"  # deepspeed exports them on every host
    variables.write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    (tmp_path / "hosts").mkdir()
    with Hosts(tmp_path / "hosts") as hosts:
        launcher = [*LAUNCHER, "--hostfile", hosts.folder / "hostfile", "--module", "megastable.train"]
        across = hosts["first"].run_process(
            [*launcher, *arguments(corpus, tmp_path / "across")],
            PATIENCE,
            {"DS_ENV_FILE": str(variables)},
            ROOT,
        )
        received = [count_received(host) for host in hosts]
    printed = across.stdout + across.stderr
    assert across.returncode == 0, printed
    done = run_main(2, tmp_path / "said", *arguments(corpus, tmp_path / "single"))
    assert done.code == 0, done

    summary = json.loads((tmp_path / "across" / "summary.json").read_text())
    assert (summary["steps"], summary["world_size"], summary["data"]) == (STEPS, 2, 2)
    for node, name in enumerate(("first", "second")):
        said = [line for line in printed.splitlines() if line.startswith(f"{name}: ")]
        assert sum(f"nnodes=2, num_local_procs=1, node_rank={node}" in line for line in said) == 1, printed
        assert sum("exits successfully" in line for line in said) == 1, printed

    # Gradients went over the wire in both directions, every step, in no less than two bytes a parameter.
    assert min(received) > 2 * summary["parameters"] * STEPS

    assert len(measured(tmp_path / "across")["step"]) == STEPS
    assert measured(tmp_path / "across") == measured(tmp_path / "single")
    single = json.loads((tmp_path / "single" / "summary.json").read_text())
    assert summary["val_loss"] == single["val_loss"]
