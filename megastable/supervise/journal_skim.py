"""Which lines of a long journal still count for how a run stands (journal_view.py): the others are not parsed. Pure.

A view keeps counts, and of most kinds of events only the newest. So of a block of lines, those that a later one of
the block makes void are left out. A block with a line that was torn, merged with another or filled with zeros is read
whole; bytes changed inside a line that is left out are not noticed.
"""

from __future__ import annotations

import re
from collections import deque

from megastable.supervise.journal_view import KEPT, TAIL

BEGIN = b'{"time": '  # of a line, as run/directory.py writes it
REFUSED = b'"event": "discarded", "step": '
PASSING = rb'(?:discarded|checkpoint_healthy|discard_examined|samples_examined|samples_dropped)", "step": \d'
# All that does not pass; evaluations, checkpoints and incidents by name, as older ones of them do.
COUNTS = re.compile(
    rb'"event": "(?!' + PASSING + rb")"
    rb'(?:(?P<evaluated>evaluated)", "step": \d+, "loss": [-"\d]'
    rb'|checkpoint", "step": \d+, "name": (?P<checkpoint>"[^"\\]+"), "bytes": \d{1,15}[,}]'
    rb'|(?P<incident>incident)", "what": ")?'
)
SUMMARY = re.compile(rb'"summary": \{"number": (\d{1,15}), ')  # each has all that is known of an incident
PASSES = re.compile(rb'"event": "(?:' + PASSING + rb'|(?:evaluated|checkpoint)", "step": \d)')


def skim(block: bytes) -> tuple[list[bytes], int]:
    """Of whole lines those that count, in order; and how many refused updates are told in the others."""
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
    # Before these, a step and words of an older summary are void, too.
    void = newest[-1] if len(newest) == TAIL else 0
    older = [at for at in older if at >= void]
    for at in (*evaluated, *list(checkpoints.values())[-KEPT:], *incidents.values(), *older, *newest):
        _keep(lines, block, at)
    chosen = [lines[begin] for begin in sorted(lines)]
    return chosen, block.count(REFUSED) - sum(line.count(REFUSED) for line in chosen)


def _odd(block: bytes) -> bool:
    """Whether any line begins or ends otherwise than events do, or has another one inside."""
    last = block.rfind(b"\n", 0, -1) + 1
    whole = block.startswith(BEGIN) and block.startswith(BEGIN, last) and block.endswith(b"}\n")
    return not whole or b"\0" in block or block.count(BEGIN) != 1 + block.count(b"}\n" + BEGIN)


def _newest(block: bytes) -> list[int]:
    """Where the newest lines that pass begin, as many as a view keeps in words."""
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
