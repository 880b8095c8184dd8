"""Writes a file of TensorBoard's events.

TensorBoard reads the files of a folder in the order of their names, which begin with the time. A process whose clock is
behind that of the one before, on another host, must not be read first: all its steps would count as undone.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter

NAME = re.compile(r"events\.out\.tfevents\.(\d{1,15})\..*")


class EventFile:
    """A new file of a folder, behind those that are there. Its methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        known = [int(found[1]) for path in folder.iterdir() if (found := NAME.fullmatch(path.name))]
        moment = max(int(time.time()), max(known, default=0) + 1)
        name = f"events.out.tfevents.{moment:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._records = RecordWriter((folder / name).open("xb"))
        source = SourceMetadata(writer="megastable")
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))
        self.flush()

    def add(self, event: Event) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()
