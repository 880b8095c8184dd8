"""Exchanges messages with the ranks of an attempt, on any host, through files of the run directory (rank_ipc.py)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megastable.base import durable
from megastable.cluster.fleet import Attempt, KernelView
from megastable.run.directory import RunDirectory, read_object
from megastable.run.rank_ipc import Control, LastWords, Progress, folder_of, pause_of

Told = TypeVar("Told", bound=BaseModel)
ANSWERS = 5.0  # seconds within which a small file is written
STACKS = 4.0  # seconds for the ranks to dump their stacks, once they have looked (rank_ipc.pause_of)


class RankFiles:
    """For one run. say: prints warnings."""

    def __init__(self, run: RunDirectory, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self._wanted = Control(attempt=0)

    # From the ranks

    def read_progress(self, attempt: int) -> Progress | None:
        """The progress of an attempt, if it has reported any."""
        read_progress = _read(Progress, self.run.progress)
        return read_progress if read_progress is not None and read_progress.attempt == attempt else None

    def read_last_words(self, attempt: int) -> list[LastWords]:
        """The last words of all ranks that left any. Torn files are ignored: the log has them, too."""
        paths = folder_of(self.run, attempt).glob("rank-*.json")
        return [words for path in paths if (words := _read(LastWords, path)) is not None]

    def collect_stacks(self, attempt: Attempt) -> tuple[list[str], dict[int, KernelView]]:
        """Ask all ranks for their stacks: the files, and the kernel's view of ranks that do not answer."""
        progress, attempt_folder = self.read_progress(attempt.number), folder_of(self.run, attempt.number)
        world_size = progress.world if progress is not None else None
        self.tell_ranks(dump=self._wanted.dump + 1)
        end_time = time.monotonic() + pause_of(world_size or 1) + STACKS
        while time.monotonic() < end_time and len(list(attempt_folder.glob("*.stacks"))) != world_size:
            time.sleep(0.2)
        kernel_views = sorted(attempt.read_kernel_views().items())
        stack_files = sorted(attempt_folder.glob("*.stacks"))
        named_files = {file_path.name for file_path in stack_files}
        mute_ranks = {rank: view for rank, view in kernel_views if f"rank-{rank}.stacks" not in named_files}
        return [str(file_path.relative_to(self.run.root)) for file_path in stack_files], mute_ranks

    # To the ranks

    def allow_only_attempt(self, attempt: int) -> None:
        """From now on ranks of earlier attempts must end. Raises OSError."""
        self._write(Control(attempt=attempt))

    def adopt_control(self, attempt: int) -> Control:
        """Continue with the control file that an earlier supervisor left for an attempt."""
        control_left = _read(Control, self.run.control) or Control(attempt=attempt)
        self._wanted = control_left.model_copy(update={"attempt": attempt})
        return self._wanted

    def tell_ranks(self, **wishes: Any) -> None:
        """Tell the ranks. On a full disk the message is lost; the timeouts then take over."""
        try:
            self._write(self._wanted.model_copy(update=wishes))
        except OSError as error:
            self.say(f"WARNING: {self.run.control} could not be written: {error}")

    def _write(self, control: Control) -> None:
        self._wanted = control
        durable.write_file(self.run.control, control.model_dump_json().encode())


def _read(kind: type[Told], path: Path) -> Told | None:
    """None if the file is missing or half-written."""
    try:
        return kind.model_validate(read_object(path))
    except ValidationError:
        return None


class StorageProbe:
    """Finds out whether the file system of a run answers, without ever waiting for it: a stall looks like a hang of the
    ranks, which write there, too. path: of a file to write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writing: threading.Thread | None = None
        self._began = 0.0

    def stalled_seconds(self) -> float | None:
        """For how many seconds a write has not come back; None if writes do. Blocks for at most `ANSWERS`. A write that
        fails, as on a full disk, has come back."""
        if self._writing is None or not self._writing.is_alive():
            self._began = time.monotonic()
            self._writing = threading.Thread(target=self._write, name="storage", daemon=True)
            self._writing.start()
        self._writing.join(max(0.0, self._began + ANSWERS - time.monotonic()))
        return time.monotonic() - self._began if self._writing.is_alive() else None

    def _write(self) -> None:
        with suppress(OSError), self.path.open("w") as file:
            file.write(str(time.time()))
            file.flush()
            os.fsync(file.fileno())
