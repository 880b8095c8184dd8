"""Determines why an attempt ended, from journal, last words, exit codes of local ranks and launcher. Pure.

No single source is reliable: the launcher can exit with 0 though a rank was killed, passes on the code of the first
rank it saw, and has no parent to read its code once its supervisor has died.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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


class FirstExit(NamedTuple):
    """How the process ended that ended first, as far as is known. who: its name in a sentence."""

    who: str = "a rank"
    rank: int | None = None
    host: str | None = None
    signal: int | None = None
    code: int | None = None


@dataclass(frozen=True)
class AttemptEvidence:
    """What is known of an attempt that has ended.

    events: of the journal since it began. words: last words of its ranks. fates: of its ranks, where they could be
    seen. code: the launcher's, None = unknown. log: the end of its output. progress: the last one. here: this host.
    gone: hosts that were lost, and how: the end of a sentence. called: a host's name in the host file, from the one
    that its ranks see. silent: the ranks that were lost first, by their connections.
    """

    events: Sequence[Event]
    words: Sequence[LastWords]
    fates: Mapping[int, Fate]
    code: int | None
    log: str
    progress: Progress | None
    here: str
    gone: Mapping[str, str] = field(default_factory=dict)
    called: Callable[[str], str] = str
    silent: FirstSilent = UNKNOWN

    @cached_property
    def killed(self) -> FirstExit:
        """Of the ranks that were killed by a signal: the one that was killed first."""
        # The launcher ends the other ranks by SIGTERM. Of several hosts, the order in which their agents were asked
        # says nothing; that in which connections ended does: NCCL's watchdog aborts those that lost a killed rank.
        killed = [(rank, fate) for rank, fate in self.fates.items() if fate.signal is not None]
        killed.sort(key=lambda of: (of[1].signal == signal.SIGTERM, of[0] not in self.silent.ranks))
        if any(fate.code for fate in self.fates.values()) or self.gone:
            killed = [of for of in killed if of[1].signal != signal.SIGTERM]
        if not killed:
            return FirstExit(code=self.code)
        rank, fate = killed[0]
        return FirstExit(f"rank {rank}", rank, fate.host, fate.signal, self.code)

    @cached_property
    def first_exit(self) -> FirstExit:
        """Of the rank that was killed; where none was seen to be, of the one that the launcher's output names."""
        told = LAUNCHER.search(self.log) if self.killed.signal in (None, signal.SIGTERM) else None
        if told is None:
            return self.killed
        status, host = int(told["code"]), told["host"] or self.here
        how = (-status, self.code) if status < 0 else (None, status)
        if told["host"] or not told["rank"]:
            return FirstExit("a rank", None, host, *how)
        # Rank 0 reports progress: its host is the only one on which both numbers are the same.
        if self.progress is None or self.called(self.progress.host) != self.here:
            return FirstExit(f"local rank {told['rank']}", None, host, *how)
        return FirstExit(f"rank {told['rank']}", int(told["rank"]), host, *how)

    def end(self, what: str, failure: str, certain: bool = True, **known: Any) -> End:
        """An end at the place that the attempt had reached."""
        step = cursor = None
        if self.progress is not None and self.progress.step is not None:
            step, cursor = self.progress.step + 1, self.progress.cursor
        for word in self.words:
            # Written at that moment; progress may be a quarter of a second old.
            if word.step is not None and (step is None or word.step + 1 > step):
                step, cursor = word.step + 1, word.cursor
        trained = self.progress is not None and self.progress.seconds is not None
        return End(
            what=what, failure=failure, certain=certain, step=step, cursor=cursor, trained=trained, **known
        )


def end_of(evidence: AttemptEvidence) -> End:
    """The end by the first of the rules that applies: what a rank reports counts before what others saw of it."""
    return next(end for rule in RULES if (end := rule(evidence)) is not None)


def read_announcement(e: AttemptEvidence) -> End | None:
    """The training itself said in the journal how it ends."""
    said = [SAID[type(event)] for event in e.events if type(event) in SAID]
    if not said:
        return None
    hosts = [str(host) for event in e.events if isinstance(event, HostFaulty) for host in event.hosts]
    return End(code=said[-1], certain=True, faulty=tuple(dict.fromkeys(map(e.called, hosts))))


def blame_first_error(e: AttemptEvidence) -> End | None:
    """A rank ended with an error of its own, and not because it lost another."""
    others = e.progress is None or e.progress.world > 1
    own = [words for words in e.words if not (others and BEREFT.search(words.error))]
    if not own:
        return None
    w = min(own, key=lambda words: words.time)
    host = e.called(w.host)
    text = f"rank {w.rank} on {host} ended with: {w.error}" + (f" ({w.where})" if w.where else "")
    return e.end(w.error[:200], text, code=w.code, rank=w.rank, host=_faulty(host, w.code))


def blame_lost_hosts(e: AttemptEvidence) -> End | None:
    """Hosts were lost, and nobody was killed: the ranks elsewhere only lost them."""
    if e.killed.signal is not None or not e.gone:
        return None
    (name, why), *others = e.gone.items()
    text = f"host {name} {why}"
    if others:
        more = len(others) - NAMED
        text += f"; and {', '.join(other for other, _ in others[:NAMED])}"
        text += f" and {more} more" if more > 0 else ""
    return e.end("host gone", text, host=None if others else name, gone=tuple(e.gone))


def blame_first_silent(e: AttemptEvidence) -> End | None:
    """All that was seen followed from the loss of ranks whose own end nobody saw."""
    seen = {e.killed.rank, *(rank for rank, fate in e.fates.items() if fate.code is not None)}
    if not e.words or e.killed.signal not in FOLLOWS or not e.silent.ranks or seen & set(e.silent.ranks):
        return None
    return e.end("rank lost", e.silent.told, rank=e.silent.rank, host=e.silent.host)


def blame_signal(e: AttemptEvidence) -> End | None:
    """A rank was killed."""
    first = e.first_exit
    if first.signal is None:
        return None
    name = _name(first.signal)
    text = f"{first.who} on {first.host or 'a host'} was killed by signal {first.signal} ({name})"
    return e.end(name, text, signal=first.signal, rank=first.rank, host=first.host)


def blame_nobody_for_lost_connections(e: AttemptEvidence) -> End | None:
    """All that spoke had lost a rank that left no last words; NCCL also reports its own failures so."""
    if not e.words:
        return None
    w = min(e.words, key=lambda words: words.time)
    text = f"{len(e.words)} ranks lost another; rank {w.rank} on {e.called(w.host)} first: {w.error}"
    return e.end("connection lost", text, certain=False)  # whoever lost it first is a witness


def blame_exit_code(e: AttemptEvidence) -> End | None:
    """A process ended with a code, and perhaps an error that its user can fix."""
    code = e.first_exit.code
    if code is None:
        code = next((fate.code for fate in e.fates.values() if fate.code), None)
    if not code:
        return None
    told = TOLD.findall(e.log)
    text = f"the training ended with code {code}" + (f": {told[-1][:500]}" if told else "")
    return e.end(f"code {code}", text, code=code, host=_faulty(e.first_exit.host, code))


def blame_nobody(e: AttemptEvidence) -> End:
    """Nothing is known."""
    if e.first_exit.code is None and not e.fates:
        return e.end("processes gone", "its processes are gone, and nobody saw them end", certain=False)
    return e.end("no word", "a rank ended without a word", certain=False, host=e.first_exit.host)


RULES: Sequence[Callable[[AttemptEvidence], End | None]] = (
    read_announcement, blame_first_error, blame_lost_hosts, blame_first_silent, blame_signal,
    blame_nobody_for_lost_connections, blame_exit_code, blame_nobody,
)  # fmt: skip


def _faulty(host: str | None, code: int) -> str | None:
    """The host to blame: a full disk is not the fault of the one that reports it, as all write to it."""
    return None if code == errors.NO_SPACE else host


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
