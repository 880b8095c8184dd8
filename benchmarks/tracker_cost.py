"""Measure what trackers cost the training process: the thread that trains, and the one that sends.

    python -m benchmarks.tracker_cost
    python -m benchmarks.tracker_cost --trackers tensorboard,wandb,mlflow --steps 5000

Processor time of this process for each step, told every 2 ms; the process of the trackers is counted apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.run.records import StepRecord
from megastable.training.tracking import Tracking, run_point

START = 5.0  # seconds for the other process to start in, which are not counted
PAUSE = 0.002  # seconds between two steps


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, time=time.time(), first_position=step, next_position=step + 1, skipped=[], applied=True, finite=True,
        clipped=False, loss=5.0, z_loss=0.0, z=2.0, grad_norm=0.5, lr=1e-3, worst_position=step, worst_loss=6.0,
        worst_micro_batch=0, worst_rank=0, worst_positions=[], worst_losses=[], seconds=1.0, data_seconds=0.01,
        tokens_per_second=1e6, mfu_full=0.4, mfu_causal=0.3, memory=1.5, loss_scale=1.0,
    )  # fmt: skip


def measure(trackers: str, steps: int) -> dict[str, object]:
    """Milliseconds a step."""
    config = RunConfig.model_validate({"logging": {"trackers": trackers.split(",")}})
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder))
        tracking = Tracking(config.logging, run, run_point(config, run, 0, 0, None), said.append)
        time.sleep(START)
        training, whole, ours = 0.0, time.process_time(), time.thread_time()
        for step in range(1, steps + 1):
            row, begin = record(step), time.thread_time()
            tracking.step(row, step)
            training += time.thread_time() - begin
            time.sleep(PAUSE)
        time.sleep(1.0)
        sending = time.process_time() - whole - (time.thread_time() - ours)
        tracking.close(seconds=60)
        others = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "trackers": trackers, "steps": steps, "thread that trains [ms]": round(1000 * training / steps, 4),
        "thread that sends [ms]": round(1000 * sending / steps, 4),
        "process of the trackers, with its start [s]": round(others.ru_utime + others.ru_stime, 2),
        "its memory [MiB]": round(others.ru_maxrss / 1024), "warnings": said,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tracker_cost", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--trackers", default="tensorboard", help="with commas between them")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print(json.dumps(measure(args.trackers, args.steps), indent=1))


if __name__ == "__main__":
    main()
