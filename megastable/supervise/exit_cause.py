"""Determines why an attempt ended, from journal, last words, exit codes of local ranks and launcher. Pure.

No single source is reliable: the launcher can exit with 0 though a rank was killed, passes on the code of the first
rank it saw, and has no parent to read its code once its supervisor has died.

A rank that loses another leaves last words, and is a witness. A process that dies closes its connection at once; a host
without power or link only falls silent, and the others notice much later. So the ranks without last words whose last
sign of life is the earliest were there first (`find_first_silent`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from megastable.base import errors
from megastable.cluster.fleet import Fate
from megastable.cluster.store import Heard
from megastable.run.events.event import Event
from megastable.run.events.stability_events import Handover, HostFaulty
from megastable.run.events.training_events import Finished, Stopped, Unstable
from megastable.run.rank_ipc import BEREFT, LastWords, Progress
from megastable.supervise.hangs import HangDetector, Suspects

# The ranks are numbered within their host.
LAUNCHER = re.compile(
    r"^\[.*?(?:'--local_rank=(?P<rank>\d+)'.*)?exits with return code = (?P<code>-?\d+)",
    re.MULTILINE,
)
# Printed by a process for an error that its user can fix (errors.user_errors).
TOLD = re.compile(r"^error: (\S.*)$", re.MULTILINE)
# How a rank may end because of another: not at all, by the launcher, or by NCCL's watchdog.
FOLLOWS = (None, signal.SIGTERM, signal.SIGABRT)
NAMED = 8  # ranks, or further hosts, in a sentence
FINAL = (errors.OK, errors.STOPPED, errors.UNSTABLE, errors.HANDOVER, errors.SUPERSEDED)
SAID: dict[type[Event], int] = {
    Finished: errors.OK,
    Stopped: errors.STOPPED,
    Handover: errors.HANDOVER,
    Unstable: errors.UNSTABLE,
}


@dataclass(frozen=True)
class FirstSilent:
    """ranks: in order; none if nothing is known. host: theirs, if it is one. told: the end of a sentence."""

    ranks: tuple[int, ...] = ()
    host: str | None = None
    told: str = ""

    @property
    def rank(self) -> int | None:
        return self.ranks[0] if len(self.ranks) == 1 else None


UNKNOWN = FirstSilent()


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
        hang_text = f"no progress in {phase!r} for {detector.waited:.0f} s"
        if detector.waited >= detector.limit:  # else a rank was found to be stopped
            hang_text += f", where {detector.limit:.0f} s is the limit"
        return End(
            hung=True, what=f"hang in {phase}", failure="; ".join([hang_text, *suspects.told]), host=suspects.host,
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
        killed_ranks = [(rank, fate) for rank, fate in self.fates.items() if fate.signal is not None]
        killed_ranks.sort(key=lambda of: (of[1].signal == signal.SIGTERM, of[0] not in self.silent.ranks))
        if any(fate.code for fate in self.fates.values()) or self.gone:
            killed_ranks = [rank_fate for rank_fate in killed_ranks if rank_fate[1].signal != signal.SIGTERM]
        if not killed_ranks:
            return FirstExit(code=self.code)
        rank, fate = killed_ranks[0]
        return FirstExit(f"rank {rank}", rank, fate.host, fate.signal, self.code)

    @cached_property
    def first_exit(self) -> FirstExit:
        """Of the rank that was killed; where none was seen to be, of the one that the launcher's output names."""
        launcher_match = LAUNCHER.search(self.log) if self.killed.signal in (None, signal.SIGTERM) else None
        if launcher_match is None:
            return self.killed
        launcher_status = int(launcher_match["code"])
        signal_and_code = (-launcher_status, self.code) if launcher_status < 0 else (None, launcher_status)
        if not launcher_match["rank"]:
            return FirstExit("a rank", None, self.here, *signal_and_code)
        # Rank 0 reports progress: its host is the only one on which both numbers are the same.
        if self.progress is None or self.called(self.progress.host) != self.here:
            return FirstExit(f"local rank {launcher_match['rank']}", None, self.here, *signal_and_code)
        return FirstExit(
            f"rank {launcher_match['rank']}", int(launcher_match["rank"]), self.here, *signal_and_code
        )

    def build_end(self, what: str, failure: str, certain: bool = True, **known: Any) -> End:
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


def find_exit_cause(evidence: AttemptEvidence) -> End:
    """The end by the first of the rules that applies: what a rank reports counts before what others saw of it."""
    return next(end for rule in RULES if (end := rule(evidence)) is not None)


def read_announcement(e: AttemptEvidence) -> End | None:
    """The training itself said in the journal how it ends."""
    announced_codes = [SAID[type(event)] for event in e.events if type(event) in SAID]
    if not announced_codes:
        return None
    hosts = [str(host) for event in e.events if isinstance(event, HostFaulty) for host in event.hosts]
    return End(code=announced_codes[-1], certain=True, faulty=tuple(dict.fromkeys(map(e.called, hosts))))


def blame_first_error(e: AttemptEvidence) -> End | None:
    """A rank ended with an error of its own, and not because it lost another."""
    others = e.progress is None or e.progress.world > 1
    own = [words for words in e.words if not (others and BEREFT.search(words.error))]
    if not own:
        return None
    w = min(own, key=lambda words: words.time)
    host = e.called(w.host)
    text = f"rank {w.rank} on {host} ended with: {w.error}" + (f" ({w.where})" if w.where else "")
    return e.build_end(w.error[:200], text, code=w.code, rank=w.rank, host=_faulty(host, w.code))


def blame_lost_hosts(e: AttemptEvidence) -> End | None:
    """Hosts were lost, and nobody was killed: the ranks elsewhere only lost them."""
    if e.killed.signal is not None or not e.gone:
        return None
    (host_name, loss_reason), *other_hosts = e.gone.items()
    failure_text = f"host {host_name} {loss_reason}"
    if other_hosts:
        unnamed_count = len(other_hosts) - NAMED
        failure_text += f"; and {', '.join(other for other, _ in other_hosts[:NAMED])}"
        failure_text += f" and {unnamed_count} more" if unnamed_count > 0 else ""
    return e.build_end("host gone", failure_text, host=None if other_hosts else host_name, gone=tuple(e.gone))


def blame_first_silent(e: AttemptEvidence) -> End | None:
    """All that was seen followed from the loss of ranks whose own end nobody saw."""
    seen = {e.killed.rank, *(rank for rank, fate in e.fates.items() if fate.code is not None)}
    if not e.words or e.killed.signal not in FOLLOWS or not e.silent.ranks or seen & set(e.silent.ranks):
        return None
    return e.build_end("rank lost", e.silent.told, rank=e.silent.rank, host=e.silent.host)


def blame_signal(e: AttemptEvidence) -> End | None:
    """A rank was killed."""
    first_exit = e.first_exit
    if first_exit.signal is None:
        return None
    signal_name = _name(first_exit.signal)
    who = f"{first_exit.who} on {first_exit.host or 'a host'}"
    failure_text = f"{who} was killed by signal {first_exit.signal} ({signal_name})"
    return e.build_end(
        signal_name, failure_text, signal=first_exit.signal, rank=first_exit.rank, host=first_exit.host
    )


def blame_nobody_for_lost_connections(e: AttemptEvidence) -> End | None:
    """All that spoke had lost a rank that left no last words; NCCL also reports its own failures so."""
    if not e.words:
        return None
    first_words = min(e.words, key=lambda words: words.time)
    who = f"rank {first_words.rank} on {e.called(first_words.host)}"
    failure_text = f"{len(e.words)} ranks lost another; {who} first: {first_words.error}"
    return e.build_end("connection lost", failure_text, certain=False)  # whoever lost it first is a witness


def blame_exit_code(e: AttemptEvidence) -> End | None:
    """A process ended with a code, and perhaps an error that its user can fix."""
    code = e.first_exit.code
    if code is None:
        code = next((fate.code for fate in e.fates.values() if fate.code), None)
    if not code:
        return None
    told = TOLD.findall(e.log)
    text = f"the training ended with code {code}" + (f": {told[-1][:500]}" if told else "")
    return e.build_end(f"code {code}", text, code=code, host=_faulty(e.first_exit.host, code))


def blame_nobody(e: AttemptEvidence) -> End:
    """Nothing is known."""
    if e.first_exit.code is None and not e.fates:
        return e.build_end("processes gone", "its processes are gone, and nobody saw them end", certain=False)
    return e.build_end("no word", "a rank ended without a word", certain=False, host=e.first_exit.host)


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


BEATS = 2.5  # seconds without a heartbeat after which a rank is silent; one is sent every second
TOGETHER = 1.0  # seconds within which ranks ended together: heartbeats come once a second


def find_first_silent(
    heard: Iterable[Heard], spoke: Collection[int], called: Callable[[str], str], now: float
) -> FirstSilent:
    """heard: of all ranks, after the attempt; spoke: those with last words; called: a host's name, from the one that
    its ranks see; now: time.monotonic()."""
    last = {
        rank.rank: (rank.at if rank.closed is None or _fell_silent(rank, now) else rank.closed, rank)
        for rank in heard
    }  # when each was last known to live
    mute = sorted((at, rank) for rank, (at, _) in last.items() if rank not in spoke)
    if not mute:
        return UNKNOWN
    # The moment of a death is exact; that of silence is known to a heartbeat.
    first, rank = mute[0]
    exact = not _fell_silent(last[rank][1], now)
    if any(at < first for witness, (at, _) in last.items() if witness in spoke):
        return UNKNOWN  # it ended after a rank that had lost another: it followed, too
    ranks = [rank] if exact else sorted(other for at, other in mute if at - first <= TOGETHER)
    hosts = {called(last[other][1].host) for other in ranks}
    later = [at for at, _ in last.values() if at - first > (0 if exact else TOGETHER)]
    if len(hosts) > 1 or not later:
        return UNKNOWN  # all at once: the store or its network failed, or all were ended
    host = hosts.pop()
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:NAMED]))}"
    who += f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    told = (
        "ended first, without last words"
        if exact
        else f"fell silent {min(later) - first:.1f} s before the others"
    )
    return FirstSilent(tuple(ranks), host, f"{who} on {host} {told}")


def _fell_silent(rank: Heard, now: float) -> bool:
    """A busy process may be late with its heartbeats, but its end is still seen as one."""
    if rank.closed is None:
        return now - rank.at > BEATS
    return rank.cut and rank.closed - rank.at > BEATS
