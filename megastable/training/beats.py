"""Sends a heartbeat a second to the supervisor's store: what this rank does, how many collectives it has entered in
every process group, and how long its own work took.

The counts are torch's own sequence numbers, read by this thread: the training thread pays nothing for them. It touches
no file once it knows the address, so a file system that stalls does not make the rank look dead.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from megastable.base import activity
from megastable.base.activity import StepTimes
from megastable.base.errors import SUPERSEDED
from megastable.run.directory import RunDirectory
from megastable.run.rank_ipc import WorkBlock, pause_of
from megastable.run.wire import Address, StoreClient

STEPS = 10  # of a block
ENOUGH = 8  # steps for a mean: a process may start within a block, or go back


class WorkBlocks:
    """Fed every step in order."""

    def __init__(self) -> None:
        self._steps: list[StepTimes] = []

    def add(self, steps: Iterable[StepTimes]) -> list[WorkBlock]:
        """The blocks that these steps complete."""
        found = []
        for one in steps:
            last = self._steps[-1][0] if self._steps else one[0]
            if one[0] // STEPS != last // STEPS or (self._steps and one[0] <= last):
                found += self._sum_up()
            self._steps.append(one)
            if one[0] % STEPS == STEPS - 1:
                found += self._sum_up()
        return found

    def _sum_up(self) -> list[WorkBlock]:
        steps, self._steps = self._steps, []
        if len(steps) < ENOUGH:
            return []
        return [WorkBlock(
            block=steps[0][0] // STEPS, step=_mean([s for _, s, _ in steps]),
            own=_mean([sum(parts) for _, _, parts in steps]),
            parts=[_mean(part) for part in zip(*(parts for _, _, parts in steps), strict=True)],
        )]  # fmt: skip


def _mean(seconds: Sequence[float]) -> float:
    return round(statistics.fmean(seconds), 6)


SECONDS = 1.0  # between two heartbeats


class Beats:
    """The heartbeats of one rank; they end with the process. Starts at once, before the process group exists."""

    def __init__(self, root: Path, attempt: int, rank: int, host: str, world: int = 1) -> None:
        self._store = RunDirectory(root).store
        self._attempt = attempt
        # Without a supervisor all ranks look for its address, for as long as that takes.
        self._pause = pause_of(world)
        self._hello = {"role": "rank", "attempt": attempt, "rank": rank, "host": host, "pid": os.getpid()}
        self._work = WorkBlocks()
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def _run(self) -> None:
        told = False
        dice = random.Random()  # of its own: the process's random states are part of every checkpoint
        while True:
            try:
                self._serve()
            except OSError:
                pass  # no supervisor now, or no way to it: the next one writes a new address
            except Exception:
                # A rank that stops speaking looks like the first one that died.
                if not told:
                    traceback.print_exc()
                told = True
            time.sleep(self._pause * dice.uniform(0.5, 1.5))  # all lose it in the same moment

    def _serve(self) -> None:
        address = Address.read(self._store)
        if address is None:
            raise FileNotFoundError(self._store)
        link = StoreClient(address, self._hello)
        try:
            self._obey(link.welcome)
            while True:
                link.send(self.beat())
                due = time.monotonic() + SECONDS
                while (left := due - time.monotonic()) > 0:
                    for message in link.receive(left):
                        self._obey(message)
        finally:
            link.close()

    def beat(self) -> dict[str, Any]:
        """The fields of `rank_ipc.Beat`."""
        name, lasted = activity.current()
        steps = [activity.timed.popleft() for _ in range(len(activity.timed))]
        work = [block.model_dump() for block in self._work.add(steps)]
        return {
            "time": round(time.time(), 3), "activity": name, "lasted": round(lasted, 3), "step": activity.step,
            "entered": entered(), **({"work": work} if work else {}),
        }  # fmt: skip

    def _obey(self, message: dict[str, Any]) -> None:
        if int(message.get("attempt", 0)) > self._attempt:
            os._exit(SUPERSEDED)


def entered() -> dict[str, int]:
    """By name of the process group: how many collectives this rank has entered in it. Names are equal on all ranks."""
    world = distributed_c10d._world
    groups: list[Any] = list(world.pg_map)  # at once: the training thread may add some
    found: dict[str, int] = {}
    for group in groups:
        name = world.pg_names.get(group)
        if name is None:
            continue  # torch is still making it, or ending it: it enters the group first and its name later
        count = group._get_sequence_number_for_group()
        found[name] = activity.collectives(count) if group is world.default_pg else count
    return found
