"""Determines why an attempt ended, from journal, last words, exit codes of local ranks and launcher. Pure.

No single source is reliable: the launcher can exit with 0 though a rank was killed, passes on the code of the first
rank it saw, and has no parent to read its code once its supervisor has died.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from megastable.base import errors
from megastable.cluster.local_attempt import Fate
from megastable.run.events.event import Event
from megastable.run.events.stability_events import Handover, HostFaulty
from megastable.run.events.training_events import Finished, Stopped, Unstable
from megastable.run.rank_ipc import BEREFT, LastWords, Progress
from megastable.supervise.first_silent import UNKNOWN, FirstSilent
from megastable.supervise.hang_detector import HangDetector

# With the host in front from pdsh. The ranks are numbered within their host.
LAUNCHER = re.compile(
    r"^(?:(?P<host>[\w.-]+): )?\[.*?(?:'--local_rank=(?P<rank>\d+)'.*)?exits with return code = (?P<code>-?\d+)",
    re.MULTILINE,
)
# Printed by a process for an error that its user can fix (errors.user_errors).
TOLD = re.compile(r"^error: (\S.*)$", re.MULTILINE)
# How a rank may end because of another: not at all, by the launcher, or by NCCL's watchdog.
FOLLOWS = (None, signal.SIGTERM, signal.SIGABRT)
NAMED = 8  # further hosts in a sentence
FINAL = (errors.OK, errors.STOPPED, errors.UNSTABLE, errors.HANDOVER, errors.SUPERSEDED)
SAID: dict[type[Event], int] = {
    Finished: errors.OK,
    Stopped: errors.STOPPED,
    Handover: errors.HANDOVER,
    Unstable: errors.UNSTABLE,
}


@dataclass(frozen=True)
class Suspects:
    """Whom a hang is due to, as far as is known. told: sentences; host, rank: if it is one."""

    told: Sequence[str] = ()
    host: str | None = None
    rank: int | None = None


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
    gone: tuple[str, ...] = ()  # hosts that were lost
    faulty: tuple[str, ...] = ()  # hosts that are proven to compute wrong

    @property
    def final(self) -> bool:
        """Whether a restart is pointless: the training ended as intended, or would end the same way again."""
        return self.code in FINAL or (self.code == errors.BAD_INPUT and not self.trained)

    def by_hang(self, detector: HangDetector, suspects: Suspects) -> End:
        """This end, after a hang for which the processes were killed."""
        if self.certain:
            return self
        phase = detector.phase
        text = f"no progress in {phase!r} for {detector.waited:.0f} s"
        if detector.waited >= detector.limit:  # else a rank was found to be stopped
            text += f", where {detector.limit:.0f} s is the limit"
        return End(
            hung=True, what=f"hang in {phase}", failure="; ".join([text, *suspects.told]), host=suspects.host,
            rank=suspects.rank, step=self.step, cursor=self.cursor, trained=self.trained,
        )  # fmt: skip


def end_of(
    events: Iterable[Event],
    words: Sequence[LastWords],
    fates: Mapping[int, Fate],
    code: int | None,
    log: str,
    progress: Progress | None,
    here: str,
    gone: Mapping[str, str] | None = None,
    called: Callable[[str], str] = str,
    silent: FirstSilent = UNKNOWN,
) -> End:
    """events: of the journal since the attempt began. words: last words of its ranks. fates: of its ranks, where they
    could be seen. code: the launcher's, None = unknown. log: the end of its output. progress: the last one. here: this
    host. gone: hosts that were lost, and how: the end of a sentence. called: a host's name in the host file, from
    the one that its ranks see. silent: the ranks that were lost first, by their connections."""
    events = list(events)
    said = [SAID[type(event)] for event in events if type(event) in SAID]
    if said:
        hosts = [str(host) for event in events if isinstance(event, HostFaulty) for host in event.hosts]
        return End(code=said[-1], certain=True, faulty=tuple(dict.fromkeys(map(called, hosts))))
    step = cursor = None
    if progress is not None and progress.step is not None:
        step, cursor = progress.step + 1, progress.cursor
    for word in words:
        # Written at that moment; progress may be a quarter of a second old.
        if word.step is not None and (step is None or word.step + 1 > step):
            step, cursor = word.step + 1, word.cursor
    trained = progress is not None and progress.seconds is not None
    place: dict[str, Any] = {"step": step, "cursor": cursor, "trained": trained}
    # The launcher ends the other ranks by SIGTERM. Of several hosts, the order in which their agents were asked says
    # nothing; that in which connections ended does: NCCL's watchdog aborts those that lost a killed rank.
    killed = [(rank, fate.signal, fate.host) for rank, fate in fates.items() if fate.signal is not None]
    killed.sort(key=lambda of: (of[1] == signal.SIGTERM, of[0] not in silent.ranks))
    if any(fate.code for fate in fates.values()) or gone:
        killed = [of for of in killed if of[1] != signal.SIGTERM]
    others = progress is None or progress.world > 1
    to_blame = [w for w in sorted(words, key=lambda w: w.time) if not (others and BEREFT.search(w.error))]
    if to_blame:
        w = to_blame[0]
        host: str | None = called(w.host)
        text = f"rank {w.rank} on {host} ended with: {w.error}" + (f" ({w.where})" if w.where else "")
        return End(
            code=w.code,
            what=w.error[:200],
            rank=w.rank,
            host=_faulty(host, w.code),
            failure=text,
            certain=True,
            **place,
        )
    rank, number, host = killed[0] if killed else (None, None, None)
    local: int | None = None  # number of a rank within its host, where its own is unknown
    if number is None and gone:
        # The ranks elsewhere only lost it.
        name, why = next(iter(gone.items()))
        text = f"host {name} {why}"
        if len(gone) > 1:
            more = list(gone)[1 : NAMED + 1]
            text += f"; and {', '.join(more)}" + (
                f" and {len(gone) - 1 - NAMED} more" if len(gone) - 1 > NAMED else ""
            )
        return End(
            what="host gone", host=name if len(gone) == 1 else None, failure=text, certain=True,
            gone=tuple(gone), **place,
        )  # fmt: skip
    ended = {rank for rank, fate in fates.items() if fate.code is not None}
    if words and number in FOLLOWS and silent.ranks and not ended.union([rank]).intersection(silent.ranks):
        return End(
            what="rank lost", rank=silent.rank, host=silent.host, failure=silent.told, certain=True, **place
        )
    if number in (None, signal.SIGTERM) and (told := LAUNCHER.search(log)):
        host, status = told["host"] or here, int(told["code"])
        number = -status if status < 0 else None
        code = status if number is None else code
        rank = None
        if told["rank"] and not told["host"]:
            # Rank 0 reports progress: its host is the only one on which both numbers are the same.
            first = progress is not None and called(progress.host) == here
            rank, local = (int(told["rank"]), None) if first else (None, int(told["rank"]))
    if number is not None:
        name = _name(number)
        who = f"rank {rank}" if rank is not None else "a rank" if local is None else f"local rank {local}"
        text = f"{who} on {host or 'a host'} was killed by signal {number} ({name})"
        return End(signal=number, what=name, rank=rank, host=host, failure=text, certain=True, **place)
    if code is None:
        code = next((fate.code for fate in fates.values() if fate.code), None)
    if words:  # all of them lost a rank that left no last words; NCCL also reports its own failures so
        w = min(words, key=lambda w: w.time)
        text = f"{len(words)} ranks lost another; rank {w.rank} on {called(w.host)} first: {w.error}"
        # Whoever lost it first is a witness.
        return End(what="connection lost", host=None, failure=text, **place)
    if code:
        told_last = TOLD.findall(log)
        text = f"the training ended with code {code}" + (f": {told_last[-1][:500]}" if told_last else "")
        return End(
            code=code, what=f"code {code}", host=_faulty(host, code), failure=text, certain=True, **place
        )
    if code is None and not fates:
        return End(what="processes gone", failure="its processes are gone, and nobody saw them end", **place)
    return End(what="no word", host=host, failure="a rank ended without a word", **place)


def _faulty(host: str | None, code: int) -> str | None:
    """The host to blame: a full disk is not the fault of the one that reports it, as all write to it."""
    return None if code == errors.NO_SPACE else host


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
