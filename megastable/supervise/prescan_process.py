"""The process that looks ahead of a run (forensics/prescan.py), kept alive by the supervisor; no run waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory

AGAIN = 60.0  # seconds before one that failed is started again
TRIES = 5


class ScoutProcess:
    """Does nothing where the recipe wants none. say: the supervisor's own lines."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        recipe: str,
        overrides: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.run, self.say = run, say
        self._command = [
            sys.executable, "-m", "megastable.forensics.prescan", "--parent", str(os.getpid()), str(run.root), recipe,
            *overrides,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self._tries = TRIES if config.data.look_ahead.steps else 0
        self._due = 0.0
        self._output: IO[bytes] | None = None

    def poll(self) -> None:
        """Start it, show what it says, start it again when it has failed."""
        if self._process is not None:
            self._show()
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            self._tries -= 1
            self._due = time.monotonic() + AGAIN
            more = "again in a minute" if self._tries else "not again: what comes is trained on unseen"
            self.say(f"WARNING: what looks ahead in the data ended with {code}: see {self._log}; {more}")
        if self._tries and time.monotonic() >= self._due:
            with suppress(OSError):
                self.run.logs.mkdir(exist_ok=True)
                with self._log.open("ab") as log:
                    at = log.tell()
                    self._process = subprocess.Popen(
                        self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
                    )  # fmt: skip
                if self._output is not None:
                    self._output.close()
                self._output = self._log.open("rb")
                self._output.seek(at)
                os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)

    def close(self) -> None:
        """End it. What it has on the ledger stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._show()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None
        self._tries = 0

    def _show(self) -> None:
        if self._output is not None and (text := self._output.read().decode(errors="replace").rstrip()):
            self.say(text)

    @property
    def _log(self) -> Path:
        return self.run.logs / "look_ahead.log"
