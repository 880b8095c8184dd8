"""Parallel map over a stream of items in several processes, with results in input order."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import TypeVar

from megastable.base.errors import MegastableError

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """`map(function, items)` in `workers` spawned processes, or in this one if `workers` is 1.

    At most 3 items per worker are in flight, so a slow consumer stops the reading of `items`. Exceptions of
    `function` are raised here. Close the iterator (`contextlib.closing`) to end the workers early;
    they also end when this process ends in any way. Raises MegastableError when a worker is killed.
    """
    if workers == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            with _interrupts_held():
                pending.append(pool.submit(function, item))
            if len(pending) >= 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise MegastableError(
            "a worker process was killed, probably for lack of memory: try again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers start: they inherit the mask, so that only this process receives it.

    The mask is this thread's; when another thread takes the signal, Python still calls the handler here.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if came:
            signal.raise_signal(signal.SIGINT)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
