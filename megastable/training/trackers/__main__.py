"""The process of a run's trackers; rank 0 starts it, and writes records to its standard input.

    python -m megastable.training.trackers tensorboard,wandb

The first line is that of the run (points.py). Lines for people go to standard output, everything that libraries print
to standard error. It ends when the input does, after `logging.tracker_timeout` at the latest.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn

from megastable.base import durable
from megastable.base.process import spare_output
from megastable.training.trackers.points import RunPoint, point_of
from megastable.training.trackers.relay import BLOCK, Lane, Relay, relay_all
from megastable.training.trackers.tracker import COMMAND, Setting, open_tracker

LOW = 10  # nice value


def main() -> NoReturn:
    """Ends the process, with all that the trackers have started."""
    parser = argparse.ArgumentParser(prog="python -m megastable.training.trackers", description=__doc__)
    parser.add_argument("trackers", help="names, with commas between them")
    parser.add_argument("--per-layer", action="store_true", help="logging.per_layer_scalars")
    parser.add_argument("--timeout", type=float, default=60.0, help="logging.tracker_timeout, in seconds")
    args = parser.parse_args()
    os.nice(LOW)
    # Ctrl-C and a scheduler's signals are for the training, whose end ends the input.
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    people = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lock = threading.Lock()

    def warn(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        with lock, contextlib.suppress(OSError):  # nobody may be there to hear it
            people.write(" ".join(text.split()) + "\n")

    code, parent = 0, os.getppid()
    try:
        run, rest = first_line(0)
        folder = Path(run.directory) / "trackers"
        folder.mkdir(exist_ok=True)
        # The process of an attempt that has just ended may still be closing its trackers.
        held = durable.lock_file(folder / ".lock", args.timeout)
        if held is None:
            warn(f"another process still tells the trackers of {run.directory}: this one tells them too")

        def lane(name: str) -> Lane:
            setting = Setting(run, name, args.per_layer, os.environ.get(COMMAND, ""), warn, args.timeout)
            return Lane(name, partial(open_tracker, name, setting), warn, args.timeout)

        relay = Relay(run, [lane(name) for name in args.trackers.split(",")])
        relay_all(relay, 0, rest, lambda: os.getppid() == parent)
        code = 0 if relay.close(args.timeout) else 1
    except Exception as error:
        logging.exception("the trackers end")
        warn(f"the trackers end: {type(error).__name__}: {error}")
        code = 1
    sys.stderr.flush()
    # Threads that hang, and what libraries wait for at exit, end here; so does what they have started.
    if os.getpid() == os.getsid(0) and code:
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def first_line(given: int) -> tuple[RunPoint, bytes]:
    """The record of the run, and what was read behind it. Raises ValueError."""
    read_bytes = b""
    while b"\n" not in read_bytes:
        if not (read_block := os.read(given, BLOCK)):
            raise ValueError("the record of the run is missing")
        read_bytes += read_block
    first_bytes, _, rest_bytes = read_bytes.partition(b"\n")
    first_point = point_of(first_bytes)
    if not isinstance(first_point, RunPoint):
        raise ValueError("the first line is not the record of a run")
    return first_point, rest_bytes


if __name__ == "__main__":
    spare_output()
    main()
