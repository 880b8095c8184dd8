"""Reads one run for its page: everything that is new, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megastable.base.text import visible
from megastable.report.run_page import plot_data, run_panel
from megastable.report.run_page.data_map import DataMap
from megastable.report.run_page.layer_map import LayerMap
from megastable.report.run_page.machine_map import MachineMap
from megastable.report.run_page.record_reader import RecordReader
from megastable.run.directory import RunDirectory, read_object
from megastable.run.goodput.watching import GoodputWatch
from megastable.run.run_history import HistoryReader, RunHistory
from megastable.supervise.status import RunWatch, Status

log = logging.getLogger(__name__)
PAUSE = 0.3  # seconds between two looks
HEAVY = threading.Lock()  # for what takes much memory for a moment, of runs of millions of steps
EVENTS = 20_000  # in the list
STATUS = 1.0  # seconds between two looks at how the run stands


class RunReader:
    """A run, as far as it was read. Raises DataError if the directory holds no run.

    version: grows with everything new; read it before anything else. Methods may be called from any thread."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, RunDirectory(root)
        self.name = visible(root.resolve().name, 80)
        self.records = RecordReader(self.run.steps)
        self.journal = HistoryReader(self.run.journal, EVENTS)
        self._time = GoodputWatch(root, self.journal)
        self._watch = RunWatch(root, journal=self.journal, goodput=self._time)
        self.layers = LayerMap(self.run.layers)
        self.machines = MachineMap(self.run.machines)
        self.data = DataMap(self.run)
        self.account: dict[str, Any] | None = None  # where the time went (run_panel.account)
        self._accounted: tuple[float, int] | None = None
        self.version = 0
        self.failures: dict[str, str] = {}  # by part of the reader: what is wrong
        self._lock = threading.RLock()
        self._due = 0.0
        self._over = threading.Event()
        self.journal.look()
        self.status: Status = self._watch.status()
        self.look()

    def start(self) -> None:
        """Go on reading, until `stop`."""
        threading.Thread(target=self._follow, name=f"reads {self.name}", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def look(self, now: bool = False) -> None:
        """Read what is new. now: also what was looked at a moment ago and takes long."""
        news = self.records.look() | self.records.see(read_object(self.run.progress))
        with self._lock:
            for part in (self.journal, self.layers, self.machines, self.data):
                with self._failing(type(part).__name__):
                    news |= part.look()
        if now or time.monotonic() >= self._due:
            self._due = time.monotonic() + STATUS
            with HEAVY:
                committed = self.committed
                before, self.status = self.status, self._watch.status()
                alive = bool(self.status.supervisor.alive or self.status.trainer.alive)
                found = self._time.look(alive) if now else self._time.account(alive)
                if found is not None and (found.end, len(found.at)) != self._accounted:
                    self.account = run_panel.account(found, self.began, self.history.starts)
                    self._accounted = (found.end, len(found.at))
                    news = True
                del found
            news |= before.state != self.status.state or before.step != self.status.step
            news |= committed != self.committed
        if news:
            self.version += 1

    def _follow(self) -> None:
        while not self._over.wait(PAUSE):
            with self._failing("RunReader"):
                self.look()
            if "RunReader" in self.failures:
                self._over.wait(5.0)

    @contextmanager
    def _failing(self, part: str) -> Iterator[None]:
        """A page must not end, nor lack its other parts, because of one file that nobody foresaw."""
        try:
            yield
        except Exception as error:
            why = f"{part} cannot read the run ({type(error).__name__}: {error})"
            told = f"a part of this page is not up to date: {why}"
            if told != self.failures.get(part):
                log.exception("%s", self.root)
                self.failures[part] = told
                self.version += 1
        else:
            if self.failures.pop(part, None):
                self.version += 1

    # What the page asks for

    @property
    def recipe(self) -> dict[str, Any]:
        """The sections of the frozen one."""
        return self._watch.sections

    @property
    def committed(self) -> set[str]:
        """Names of the checkpoints that are there."""
        return self._watch.committed

    @property
    def history(self) -> RunHistory:
        """What the journal says."""
        return self.journal.history

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        length = self.recipe.get("model", {}).get("sequence_length")
        return length if isinstance(length, int) and length > 0 else 1

    @property
    def began(self) -> float:
        """Unix seconds."""
        if (began := self.history.began) is not None:
            return began
        with self.records.table() as table:
            return float(table.steps["time"][0]) if len(table.steps) else 0.0

    def line(self) -> str:
        """How the run stood at the last look, in a line that is there at once."""
        s = self.status
        return f"{self.name}: {s.state.value}, step {s.step:,}" + (f" of {s.steps:,}" if s.steps else "")

    def head(self) -> dict[str, Any]:
        """The headline, and what else changes with every step."""
        with self._lock:
            return run_panel.head(self)

    def panel(self) -> dict[str, Any]:
        """All but the plots: incidents, checkpoints, time, data, machines."""
        with self._lock:
            return run_panel.panel(self)

    def plots(self, axis: str, begin: float | None, end: float | None, columns: int) -> dict[str, Any]:
        began = self.began
        with HEAVY, self.records.table() as table:
            return plot_data.plot_data(table, self.length, began, axis, begin, end, columns)

    def heat(self, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
        """Heat maps of the layers."""
        with self._lock:
            return run_panel.heat(self, axis, begin, end)

    def machine_maps(self, axis: str, begin: float | None, end: float | None) -> dict[str, Any]:
        """Ranks, GPUs and hosts."""
        with self._lock:
            return run_panel.machine_maps(self, axis, begin, end)


def told_apart(readers: Sequence[RunReader]) -> Sequence[RunReader]:
    """The same; runs whose directories have the same name are also called by the one above."""
    names = Counter(reader.name for reader in readers)
    for reader in readers:
        if names[reader.name] > 1:
            reader.name = visible("/".join(reader.root.resolve().parts[-2:]), 80)
    return readers
