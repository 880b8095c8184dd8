"""The command of the Kubernetes manifest as it stands, in two pods, which are drained, lost and replaced."""

from __future__ import annotations

import copy
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drills.hosts import Hosts
from drills.namespaces import missing
from megastable.base import errors
from megastable.run import records
from tests.launch.pods import Pods, expanded
from tests.patience import PATIENCE

FILE = Path(__file__).resolve().parents[2] / "launch/kubernetes.yaml"
OBJECTS: dict[str, Any] = {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text())}
STEPS = 120
# What a user sets for a small model, two ranks and no GPU. The corpus lies on the shared volume, as the manifest says.
SMALL = (
    "model.layers=2 model.hidden=64 model.heads=2 model.kv_heads=2 model.ffn=128 model.sequence_length=32 "
    f"schedule.warmup_steps=5 train.steps={STEPS} train.global_batch=16 train.micro_batch=2 train.eval_samples=16 "
    "checkpoint.interval=10 logging.trackers=[] logging.peak_tflops=1 data.corpora.0.path=/shared/corpus"
).split()
NO_GPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def edited() -> dict[str, Any]:
    """The manifest with what its head says is to be set: recipe, GPUs, variables for the pods."""
    objects = copy.deepcopy(OBJECTS)
    (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    arguments[arguments.index("--num_gpus") + 1] = "1"
    arguments[arguments.index("--") : arguments.index("--")] = SMALL
    objects["ConfigMap"]["data"] |= NO_GPU
    return objects


def test_variables_are_expanded_as_kubernetes_does() -> None:
    assert expanded("$(A)-$(B) $$(A) $A", {"A": "1"}) == "1-$(B) $(A) $A"


def until(what: Callable[[], object], said: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, said()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(8 * PATIENCE)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_two_pods_train_to_the_end_though_they_are_drained_and_lost(corpus: Path, tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts") as hosts:
        pods = Pods(edited(), hosts, tmp_path)
        shutil.copytree(corpus, hosts.shared.outside / "corpus")
        pods.own_volume()
        run = hosts.shared.outside / "runs/7b"
        running = {index: pods.start(index) for index in (1, 0)}  # in any order

        def said() -> str:
            return "\n".join(f"pod {i}: {pods.log(i).read_text()[-3000:]}" for i in (0, 1))

        def step() -> int:
            assert all(one.poll() is None for one in running.values()), said()
            try:
                return int(json.loads((run / "progress.json").read_text())["step"] or 0)
            except (OSError, ValueError):
                return 0

        until(lambda: step() >= 3, said)
        refused = pods.again(0, there=1)
        assert refused.returncode == errors.BAD_INPUT, refused
        assert "another supervisor watches this run" in refused.stderr + refused.stdout

        # A pod that is drained has the run saved; all pods end, and are replaced
        assert running[1].send(signal.SIGTERM)
        codes = {index: one.wait(PATIENCE) for index, one in running.items()}
        assert codes == {0: errors.STOPPED, 1: errors.STOPPED}, said()
        running = {index: pods.replace(index) for index in running}

        # Each is lost once
        for index, at in ((1, 25), (0, 65)):  # steps after the checkpoints of steps 20 and 60
            until(lambda at=at: step() >= at, said)  # type: ignore[misc]
            running[index] = pods.replace(index)
        codes = {index: one.wait(PATIENCE) for index, one in running.items()}
        assert codes == {0: errors.OK, 1: errors.OK}, said()
        events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
        steps = records.read(run / "steps").column("step").to_pylist()
        logs = said()
    assert (summary["steps"], summary["world_size"]) == (STEPS, 2), logs
    # Neither is taken for a hang: the new pod's agent has nothing of the attempt.
    ended = [(event["what"], event["host"], event["code"]) for event in events if event["event"] == "ended"]
    stopped, *ended = ended
    assert stopped == ("", None, errors.STOPPED)
    assert ended == [("host gone", "host-1", None), ("host gone", "host-0", None), ("", None, errors.OK)], (
        logs
    )
    # From the checkpoint, or from a later point in the memory of the other pod's host, if its copy was done in time.
    resumed = [(event["step"], event["origin"]) for event in events if event["event"] == "resumed"][1:]
    for (found, origin), saved in zip(resumed, (20, 60), strict=True):
        assert found == saved if origin == "checkpoint" else saved < found < saved + 20, logs
    assert steps == list(range(1, STEPS + 1))
