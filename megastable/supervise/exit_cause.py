"""Determines why an attempt ended, from journal, last words, exit codes of local ranks and launcher. Pure.

No single source is reliable: the launcher can exit with 0 though a rank was killed, passes on the code of the first
rank it saw, and has no parent to read its code once its supervisor has died.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from megastable.base import errors
from megastable.run.events.event import Event
from megastable.run.events.stability_events import Handover
from megastable.run.events.training_events import Finished, Stopped, Unstable
from megastable.run.rank_ipc import BEREFT, LastWords, Progress
from megastable.supervise.hang_detector import HangDetector
from megastable.supervise.processes import Fate

# With the host in front from pdsh; without, all ranks are on this host and local ranks are global ranks.
LAUNCHER = re.compile(
    r"^(?:(?P<host>[\w.-]+): )?\[.*?(?:'--local_rank=(?P<rank>\d+)'.*)?exits with return code = (?P<code>-?\d+)",
    re.MULTILINE,
)
# Printed by a process for an error that its user can fix (errors.user_errors).
TOLD = re.compile(r"^error: (\S.*)$", re.MULTILINE)
FINAL = (errors.OK, errors.STOPPED, errors.UNSTABLE, errors.HANDOVER, errors.SUPERSEDED)
SAID: dict[type[Event], int] = {
    Finished: errors.OK,
    Stopped: errors.STOPPED,
    Handover: errors.HANDOVER,
    Unstable: errors.UNSTABLE,
}


class End(BaseModel):
    """code: of errors.py, None for a signal or if unknown. what: the kind of failure, equal for equal failures. step:
    the one in progress, None before the first; cursor: its first position. failure: a sentence."""

    model_config = ConfigDict(frozen=True)

    code: int | None = None
    signal: int | None = None
    hung: bool = False
    what: str = ""
    step: int | None = None
    cursor: int | None = None
    rank: int | None = None
    host: str | None = None
    failure: str = ""
    certain: bool = False  # reported by a process, or observed
    trained: bool = False  # at least one step was done

    @property
    def final(self) -> bool:
        """Whether a restart is pointless: the training ended as intended, or would end the same way again."""
        return self.code in FINAL or (self.code == errors.BAD_INPUT and not self.trained)

    def by_hang(self, detector: HangDetector, stuck: Sequence[str], here: str) -> End:
        """This end, after a hang for which the processes were killed. stuck: what is known of ranks of this host that
        do not respond."""
        if self.certain:
            return self
        phase = detector.phase
        text = (
            f"no progress in {phase!r} for {detector.waited:.0f} s, where {detector.limit:.0f} s is the limit"
        )
        return End(
            hung=True, what=f"hang in {phase}", failure="; ".join([text, *stuck]),
            host=here if len(stuck) == 1 else None, step=self.step, cursor=self.cursor, trained=self.trained,
        )  # fmt: skip


def end_of(
    events: Iterable[Event],
    words: Sequence[LastWords],
    fates: Mapping[int, Fate],
    code: int | None,
    log: str,
    progress: Progress | None,
    here: str,
) -> End:
    """events: of the journal since the attempt began. words: last words of its ranks. fates: of its ranks on this host,
    `here`. code: the launcher's, None = unknown. log: the end of its output. progress: the last one."""
    said = [SAID[type(event)] for event in events if type(event) in SAID]
    if said:
        return End(code=said[-1], certain=True)
    step = cursor = None
    if progress is not None and progress.step is not None:
        step, cursor = progress.step + 1, progress.cursor
    for word in words:
        # Written at that moment; progress may be a quarter of a second old.
        if word.step is not None and (step is None or word.step + 1 > step):
            step, cursor = word.step + 1, word.cursor
    trained = progress is not None and progress.seconds is not None
    place: dict[str, Any] = {"step": step, "cursor": cursor, "trained": trained}
    # In the order they were seen. The launcher ends the other ranks by SIGTERM.
    killed = [(rank, fate.signal) for rank, fate in fates.items() if fate.signal is not None]
    killed.sort(key=lambda of: of[1] == signal.SIGTERM)
    if any(fate.code for fate in fates.values()):
        killed = [(rank, number) for rank, number in killed if number != signal.SIGTERM]
    others = progress is None or progress.world > 1
    to_blame = [w for w in sorted(words, key=lambda w: w.time) if not (others and BEREFT.search(w.error))]
    if to_blame:
        w = to_blame[0]
        text = f"rank {w.rank} on {w.host} ended with: {w.error}" + (f" ({w.where})" if w.where else "")
        return End(
            code=w.code, what=w.error[:200], rank=w.rank, host=w.host, failure=text, certain=True, **place
        )
    rank, number = killed[0] if killed else (None, None)
    host: str | None = here if rank is not None else None
    if number in (None, signal.SIGTERM) and (told := LAUNCHER.search(log)):
        host, status = told["host"] or here, int(told["code"])
        number = -status if status < 0 else None
        code = status if number is None else code
        rank = int(told["rank"]) if told["rank"] and not told["host"] else None
    if number is not None:
        name = _name(number)
        who = f"rank {rank}" if rank is not None else "a rank"
        text = f"{who} on {host or 'a host'} was killed by signal {number} ({name})"
        return End(signal=number, what=name, rank=rank, host=host, failure=text, certain=True, **place)
    if code is None:
        code = next((fate.code for fate in fates.values() if fate.code), None)
    if words:  # all of them lost a rank that left no last words; NCCL also reports its own failures so
        w = min(words, key=lambda w: w.time)
        text = f"{len(words)} ranks lost another; rank {w.rank} on {w.host} first: {w.error}"
        return End(what="connection lost", host=host, failure=text, **place)
    if code:
        told_last = TOLD.findall(log)
        text = f"the training ended with code {code}" + (f": {told_last[-1][:500]}" if told_last else "")
        return End(code=code, what=f"code {code}", host=host, failure=text, certain=True, **place)
    if code is None and not fates:
        return End(what="processes gone", failure="its processes are gone, and nobody saw them end", **place)
    return End(what="no word", host=host, failure="a rank ended without a word", **place)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
