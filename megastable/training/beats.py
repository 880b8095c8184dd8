"""Sends a heartbeat a second to the supervisor's store: what this rank does, and how many collectives it has entered in
every process group.

The counts are torch's own sequence numbers, read by this thread: the training thread pays nothing for them. It touches
no file once it knows the address, so a file system that stalls does not make the rank look dead.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from megastable.base import activity
from megastable.base.errors import SUPERSEDED
from megastable.run.directory import RunDirectory
from megastable.run.wire import Address, StoreClient

SECONDS = 1.0  # between two heartbeats
AGAIN = 2.0  # ... between two tries to connect


class Beats:
    """The heartbeats of one rank; they end with the process. Starts at once, before the process group exists."""

    def __init__(self, root: Path, attempt: int, rank: int, host: str) -> None:
        self._store = RunDirectory(root).store
        self._attempt = attempt
        self._hello = {"role": "rank", "attempt": attempt, "rank": rank, "host": host, "pid": os.getpid()}
        threading.Thread(target=self._run, name="beats", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._serve()
            except OSError:  # no supervisor now, or no way to it: the next one writes a new address
                time.sleep(AGAIN)

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
        return {
            "time": round(time.time(), 3), "activity": name, "lasted": round(lasted, 3), "step": activity.step,
            "entered": entered(),
        }  # fmt: skip

    def _obey(self, message: dict[str, Any]) -> None:
        if int(message.get("attempt", 0)) > self._attempt:
            os._exit(SUPERSEDED)


def entered() -> dict[str, int]:
    """By name of the process group: how many collectives this rank has entered in it. Names are equal on all ranks."""
    world = distributed_c10d._world
    groups: list[Any] = list(world.pg_map)  # at once: the training thread may add some
    return {world.pg_names[group]: group._get_sequence_number_for_group() for group in groups}
