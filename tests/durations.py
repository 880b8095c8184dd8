"""What each test costs, and which quick tests cost too much.

    python -m tests.durations [--top 20]     after a run of pytest: the slowest, and an error for what is over the limit

pytest writes `.pytest_cache/durations.tsv` (conftest.py): a line for the call of each test, and one for its fixtures.

A cost is in seconds on a quiet core: the processor time of the test and of all that it started, and the time in which
its cores were idle, because it slept or waited for a disk. What other programs took of a busy machine is not in it.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing.forkserver
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

LIMIT = 5.0  # seconds that a quick test may cost, and so may its fixtures
FILE = Path(__file__).parent.parent / ".pytest_cache/durations.tsv"
TICK = os.sysconf("SC_CLK_TCK")
get_affinity, read_times, read_monotonic = (
    os.sched_getaffinity,
    os.times,
    time.monotonic,
)  # tests replace them

# Quick tests, or fixtures (`FILE::fixtures`), that cost more than the limit, and why they stay quick.
ALLOWED: dict[str, str] = {}


class Clock(NamedTuple):
    """Readings at one moment, in seconds."""

    wall: float
    processor: float  # of this process, its ended children, and the ranks of tests/distributed.py
    idle: float  # of the cores that this process may use, by core

    @classmethod
    def read(cls) -> Clock:
        own = read_times()
        processor = own.user + own.system + own.children_user + own.children_system
        server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        if server is not None:  # ranks are its children, not ours; what it imports once is for all tests
            ended = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[13:15]
            processor += sum(map(int, ended)) / TICK
        cores = {f"cpu{core}" for core in get_affinity(0)}
        with open("/proc/stat") as lines:
            idle = sum(int(line.split()[4]) for line in lines if line.split()[0] in cores)
        return cls(read_monotonic(), processor, idle / TICK / len(cores))

    def cost_until(self, end: Clock) -> float:
        return min(end.wall - self.wall, end.processor - self.processor + end.idle - self.idle)


def write_durations(costs: dict[str, float]) -> None:
    FILE.parent.mkdir(exist_ok=True)
    rows = sorted(costs.items(), key=lambda row: -row[1])
    FILE.write_text("".join(f"{cost:.2f}\t{name}\n" for name, cost in rows))


def find_slow_tests(costs: dict[str, float]) -> dict[str, float]:
    """Those over the limit that `ALLOWED` does not name, with or without their parameters."""
    return {
        name: cost
        for name, cost in costs.items()
        if cost > LIMIT and name not in ALLOWED and name.partition("[")[0] not in ALLOWED
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What the tests of the last run cost, in seconds on a quiet core."
    )
    parser.add_argument("--top", type=int, default=10, help="how many to list (default: 10)")
    parser.add_argument(
        "--names", action="store_true", help="only the names of those over the limit, with their files"
    )
    options = parser.parse_args()
    costs = {name: float(cost) for cost, name in (line.split("\t") for line in FILE.read_text().splitlines())}
    slow = find_slow_tests(costs)
    if options.names:
        print("\n".join(name.removesuffix("::fixtures") for name in slow))
        return 0
    rooms: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name, cost in costs.items():
        rooms["/".join(name.partition("::")[0].split("/")[:2])] += cost
    most = sorted(rooms.items(), key=lambda room: -room[1])[:12]
    print(
        f"{sum(costs.values()):.0f} s of one core; most: "
        + ", ".join(f"{room} {cost:.0f}" for room, cost in most)
    )
    for name, cost in list(costs.items())[: options.top]:
        print(f"{cost:7.2f}  {name}")
    for name, cost in slow.items():
        print(
            f"over {LIMIT:g} s: {cost:.1f} s, {name}: make it cheaper or slow, or give a reason in tests/durations.py"
        )
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
