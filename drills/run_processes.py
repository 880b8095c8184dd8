"""Find and end the processes of one drilled run, by the environment variable that all of them inherit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from drills.plan import VARIABLE

GONE_SECONDS = 10.0  # after SIGKILL; a process still alive then is stuck in the kernel


class Family:
    """`with Family(plan, command, log) as family`: starts the command at once, and leaves no process behind."""

    def __init__(self, plan: Path, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._plan, self._command, self._log = str(plan), command, log
        # Ranks are identified by RANK: a process started by a launcher may itself start drills.
        ours = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        self._environment = {**ours, **environment, VARIABLE: self._plan}
        self.parent: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        until = time.monotonic() + GONE_SECONDS
        # Repeatedly: a process that is being ended may be starting another.
        while (members := list(self.members())) and time.monotonic() < until:
            for member in members:
                with suppress(psutil.Error):
                    member.kill()
            psutil.wait_procs(members, timeout=0.5)
            self.parent.poll()
        self.parent.wait()

    def start(self) -> None:
        """Start or restart the command, in a session of its own, so that Ctrl-C reaches only this process."""
        with self._log.open("ab") as log:
            self.parent = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def members(self) -> Iterator[psutil.Process]:
        """All living processes."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(VARIABLE) == self._plan:
                    yield process

    def rank(self, number: int) -> psutil.Process | None:
        """The process of a rank: the oldest with its RANK, which its children inherit."""
        found = []
        for process in self.members():
            with suppress(psutil.Error):
                if process.environ().get("RANK") == str(number):
                    found.append((process.create_time(), process.pid, process))
        return min(found)[2] if found else None

    def strike(self, number: int, by: signal.Signals) -> bool:
        """Send a signal to a rank; whether there was one."""
        process = self.rank(number)
        if process is None:
            return False
        try:
            process.send_signal(by)
        except psutil.Error:
            return False
        return True
