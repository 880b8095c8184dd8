"""Measure what all watching of a run costs its steps: page, trackers, metrics and phase timers together.

    python -m benchmarks.watch_cost --steps 400

One rank trains 5M parameters. In the same run, blocks of steps with and without alternate, in the order ABBA. With: the
page's server with an open page, metrics that are scraped every five seconds, the trackers tensorboard, jsonl and
command, and the timers of phases. Without: these processes are stopped, and the calls do nothing. Of every pair of
blocks:

- own: seconds of the training thread in calls of trackers and timers, at most, as a share of a step: what training
  pays on a host that has cores to spare. It holds on a busy machine, too. The target, 0.3 %, is for this one.
- thread, process: processor time of the training thread, and of its process with the thread that sends.
- queued: time in which the training thread could have run, but no core was free; page and metrics compete for cores.
- wall: the whole step on the clock, with all of these.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.costs import Estimate, estimate
from benchmarks.hardware_watch_cost import parser, trained
from benchmarks.ranks import launch
from megastable.config.tree import RunConfig

ROOT = Path(__file__).parents[1]
BLOCK = 5  # steps
FIRST = 10  # steps that are left out, in which everything starts
LIMIT = 0.003  # of a step
TRACKERS = ("tensorboard", "jsonl", "command")
# A program that reads all records.
SINK = shlex.join([sys.executable, "-c", "import sys; [None for _ in sys.stdin]"])
SCHEDULER = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, number of times
NAMES = ("own", "thread", "process", "queued", "wall")
Row = dict[str, float]
"""Seconds by name, and `on`: whether the step was watched."""


def measure(config: RunConfig) -> list[Row]:
    """Of every step that counts; whole pairs of blocks."""
    from megastable.base import activity
    from megastable.engine.engine import Engine
    from megastable.train import train
    from megastable.training.observer import Observer
    from megastable.training.tracking import Tracking

    rows, spent, on, count = list[Row](), [0.0], [True], [0]
    watchers = list[subprocess.Popen[str]]()

    def switched(call: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            if not on[0]:
                return instead(*args, **kwargs)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - begin

        return inner

    def nothing(*_: Any, **__: Any) -> None: ...

    for name in ("begin", "end", "enter", "waited"):
        setattr(activity, name, switched(getattr(activity, name), nothing))
    for name in ("step", "layers", "validation"):
        setattr(Tracking, name, switched(getattr(Tracking, name), nothing))
    phases = Observer._with_phases
    Observer._with_phases = switched(phases, lambda _, record: record)  # type: ignore[method-assign]
    real, last = Engine.train_step, dict[str, float]()

    def train_step(self: Engine, *args: Any) -> Any:
        found = real(self, *args)
        now, done = clocks(spent[0]), count[0] - FIRST
        count[0] += 1
        if done >= 0:
            rows.append({"on": on[0], **{name: now[name] - last[name] for name in NAMES}})
        if count[0] == FIRST // 2:
            watchers.extend(watched(config))
        if done >= -1 and (done + 1) % BLOCK == 0:
            wanted = ((done + 1) // BLOCK) % 4 in (0, 3)  # ABBA
            if wanted != on[0]:
                on[0] = wanted
                for process in psutil.Process().children(recursive=True):
                    process.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)
        last.update(clocks(spent[0]))
        return found

    Engine.train_step = train_step  # type: ignore[method-assign,assignment]
    try:
        train(config, Path("recipe.yaml"))
    finally:
        # The last block may have been one without them.
        for child in psutil.Process().children(recursive=True):
            child.send_signal(signal.SIGCONT)
        for process in watchers:
            process.kill()
            process.communicate()
    return rows[: len(rows) // (2 * BLOCK) * 2 * BLOCK]


def clocks(own: float) -> Row:
    """Seconds so far of all NAMES, for the thread that asks."""
    queued = int(SCHEDULER.read_text().split()[1]) / 1e9
    return {
        "own": own, "thread": time.thread_time(), "process": time.process_time(), "queued": queued,
        "wall": time.perf_counter(),
    }  # fmt: skip


def watched(config: RunConfig) -> list[subprocess.Popen[str]]:
    """The page's server, and all that watch."""
    assert config.run.dir is not None
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(config.run.dir.parent / "cache"),
    }
    words = [sys.executable, str(ROOT / "tools/watch.py"), str(config.run.dir), "--port", "0"]
    server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[0]
    words = [sys.executable, "-m", "benchmarks.watch_audience", str(config.run.dir), address]
    audience = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert audience.stdout is not None
    assert audience.stdout.readline().strip() == "watching"
    return [server, audience]


def assess(rows: list[Row]) -> dict[str, Estimate]:
    """The cost of watching by name, as a share of a step without: medians over pairs of blocks, with 95% intervals."""
    blocks = [rows[first : first + BLOCK] for first in range(0, len(rows), BLOCK)]
    pairs = list(zip(blocks[0::2], blocks[1::2], strict=True))
    step = statistics.median(row["wall"] for row in rows if not row["on"])
    found = {}
    for name in NAMES:
        differences = []
        for first, second in pairs:
            means = {
                bool(block[0]["on"]): statistics.fmean(row[name] for row in block)
                for block in (first, second)
            }
            differences.append(means[True] - means[False])
        found[name] = estimate([(np.array(differences), 1.0)], 1 / step)
    return found


def main(arguments: list[str] | None = None) -> None:
    given = parser(__doc__, 400, "in a step")
    given.add_argument("--json", type=Path, metavar="FILE", help="write the result there, too")
    args = given.parse_args(arguments)
    if args.steps < FIRST + 4 * BLOCK:
        given.error(f"--steps {args.steps}: at least {FIRST + 4 * BLOCK}, for two pairs of blocks")
    with trained(args.steps, args.samples) as config:
        train = config.train.model_copy(update={"global_batch": args.samples})
        stability = config.stability.model_copy(update={"enabled": False})
        logging = config.logging.model_copy(update={"trackers": TRACKERS, "tracker_command": SINK})
        config = config.model_copy(update={"train": train, "stability": stability, "logging": logging})
        (rows,) = launch(1, measure, config, 60 * args.minutes)
    found = assess(rows)
    step = statistics.median(row["wall"] for row in rows if not row["on"])
    print(
        f"a step takes {1e3 * step:.1f} ms; {len(rows) // (2 * BLOCK)} pairs of {BLOCK} steps, "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; cost of watching, of a step:"
    )
    for name, cost in found.items():
        print(f"{name:8} {cost.median:+.3%}  ({cost.low:+.3%} to {cost.high:+.3%})")
    print(f"ratio of the wall times: {1 + found['wall'].median:.4f}")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"step": step, "rows": rows, "costs": {n: vars(c) for n, c in found.items()}})
        )
    if found["own"].median > LIMIT:
        raise SystemExit(f"own calls take more than {LIMIT:.1%} of a step")


if __name__ == "__main__":
    main()
