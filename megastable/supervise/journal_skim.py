"""Selects the lines of a long journal that matter for the status (journal_view.py), so that only these are parsed.

A view keeps counts, and only the newest of most kinds of events. So lines that a later line of the same block
supersedes are left out. A block with a torn, merged or zero-filled line is read whole; corruption inside a skipped line
goes unnoticed.
"""

from __future__ import annotations

import re
from collections import deque

from megastable.supervise.journal_view import KEPT, TAIL

BEGIN = b'{"time": '  # start of a line, as run/directory.py writes it
REFUSED = b'"event": "discarded", "step": '
PASSING = rb'(?:discarded|checkpoint_healthy|discard_examined|samples_examined|samples_dropped)", "step": \d'
# All events that are not transient; evaluations, checkpoints and incidents are named, as older ones are transient.
COUNTS = re.compile(
    rb'"event": "(?!' + PASSING + rb")"
    rb'(?:(?P<evaluated>evaluated)", "step": \d+, "loss": [-"\d]'
    rb'|checkpoint", "step": \d+, "name": (?P<checkpoint>"[^"\\]+"), "bytes": \d{1,15}[,}]'
    rb'|(?P<incident>incident)", "what": ")?'
)
SUMMARY = re.compile(rb'"summary": \{"number": (\d{1,15}), ')  # each carries the whole incident
PASSES = re.compile(rb'"event": "(?:' + PASSING + rb'|(?:evaluated|checkpoint)", "step": \d)')


def skim(block: bytes) -> tuple[list[bytes], int]:
    """The lines that matter, in order, and the number of refused updates that the others report."""
    if _odd(block):
        return block.removesuffix(b"\n").split(b"\n"), 0
    lines = {0: _line(block, 0)}
    evaluated, checkpoints = deque[int](maxlen=KEPT), dict[bytes, int]()
    incidents, older = dict[bytes, int](), list[int]()
    for found in COUNTS.finditer(block):
        if found["evaluated"]:
            evaluated.append(found.start())
        elif name := found["checkpoint"]:
            checkpoints.pop(name, None)
            checkpoints[name] = found.start()
        elif found["incident"] and (
            told := SUMMARY.search(block, found.end(), block.index(b"\n", found.end()))
        ):
            if told[1] in incidents:
                older.append(incidents[told[1]])
            incidents[told[1]] = found.start()
        else:
            _keep(lines, block, found.start())
    newest = _newest(block)
    # Before these, steps and older summaries are superseded, too.
    void = newest[-1] if len(newest) == TAIL else 0
    older = [at for at in older if at >= void]
    for at in (*evaluated, *list(checkpoints.values())[-KEPT:], *incidents.values(), *older, *newest):
        _keep(lines, block, at)
    chosen = [lines[begin] for begin in sorted(lines)]
    return chosen, block.count(REFUSED) - sum(line.count(REFUSED) for line in chosen)


def _odd(block: bytes) -> bool:
    """Whether any line begins or ends unlike an event, or contains another event."""
    last = block.rfind(b"\n", 0, -1) + 1
    whole = block.startswith(BEGIN) and block.startswith(BEGIN, last) and block.endswith(b"}\n")
    begun = block.count(BEGIN)
    return not whole or b"\0" in block or not begun == 1 + block.count(b"}\n" + BEGIN) == block.count(b"\n")


def _newest(block: bytes) -> list[int]:
    """Offsets of the newest transient lines, as many as a view shows."""
    found, end = list[int](), len(block)
    while end > 0 and len(found) < TAIL:
        begin = block.rfind(b"\n", 0, end - 1) + 1
        if PASSES.search(block, begin, end):
            found.append(begin)
        end = begin
    return found


def _keep(lines: dict[int, bytes], block: bytes, at: int) -> None:
    begin = block.rfind(b"\n", 0, at) + 1
    if begin not in lines:
        lines[begin] = _line(block, begin)


def _line(block: bytes, begin: int) -> bytes:
    return block[begin : block.index(b"\n", begin)]
