"""The process above the training: starts the launcher, watches, finds out why it ended, and starts it again.

It decides by the policy that the training decides by (stability/policy.py), and keeps nothing to itself: killed at any
moment and started again, it goes on from the journal, and takes over what its predecessor left running. It
imports neither torch nor deepspeed, and talks to the ranks through files only (heartbeat.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from megastable.base import durable, errors
from megastable.base.errors import ConfigError, DataError, MegastableError, SpaceError, UnstableError
from megastable.config.supervise import redacted_override
from megastable.config.tree import RunConfig
from megastable.data.skip_ledger import append_all
from megastable.data.skips import Range
from megastable.run.directory import RunDirectory
from megastable.run.events.event import Event
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.supervisor_events import Ended, Hang, Launched, Restart, SupervisorEvent
from megastable.run.log import RunLog
from megastable.run.rank_ipc import Progress, folder_of, log_of
from megastable.stability.actions import Action, Cause, Remedy
from megastable.stability.attribution import ranges
from megastable.stability.failures import Failure, after_failure, pause
from megastable.stability.incident import Breakdown, Incident, Outcome
from megastable.supervise.exit_cause import End, end_of
from megastable.supervise.failed_data import bad_data, readable, samples_of
from megastable.supervise.follow import Follower
from megastable.supervise.hang_detector import Patience
from megastable.supervise.journal_memory import JournalMemory
from megastable.supervise.prescan_process import PrescanProcess
from megastable.supervise.processes import Attempt, command, hosts
from megastable.supervise.rank_files import Wire

LOOK = 0.2  # seconds between two looks: a dead rank waits about a second for the launcher to notice
ORDERLY = (
    30.0  # seconds from the first rank's end to the last one's, where they end for a reason they all know
)
NO_ROOM = 60.0  # seconds between two tries on a full disk
LOG_TAIL = 64_000
FINAL = (errors.OK, errors.STOPPED, errors.UNSTABLE, errors.HANDOVER, errors.SUPERSEDED)


class Listener(Protocol):
    """Who is told: a terminal, people, metrics, reports."""

    def event(self, event: Event) -> None: ...

    def output(self, text: str) -> None: ...

    def say(self, text: str) -> None: ...

    def tick(self) -> None: ...


class Supervisor:
    """Of one run. recipe, overrides: for the training; given: for the deepspeed launcher; module: what it starts."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        audience: Listener,
        recipe: str,
        overrides: Sequence[str],
        given: Sequence[str] = (),
        module: str = "megastable.train",
    ) -> None:
        self.config, self.run, self.audience = config, run, audience
        self.recipe, self.given, self.module = recipe, list(given), module
        # The ranks tell nobody: they need no password, and other users see their arguments.
        self.overrides = [redacted_override(text) for text in overrides]
        self.log = RunLog(run, audience.say)
        self.here = socket.gethostname()
        self.memory = JournalMemory()
        self.patience = Patience(config.supervise)
        self.signals = 0
        self.wire = Wire(run, audience.say)
        self.scout = PrescanProcess(config, run, recipe, self.overrides, audience.say)
        self._journal = Follower(run.journal)
        self._read = 0  # bytes of the present log that were shown
        self._has_data = (
            False  # the corpora could be read on this host at the start: what is wrong since is damage
        )
        self._failed: float | None = None  # when the failure that is being mended was noticed

    # From the first attempt to the last

    def supervise(self) -> int:
        """Run until the training is complete, stopped, or beyond help. The exit code, one of errors.py.

        Raises ConfigError when another supervisor is at work here.
        """
        with self._alone():
            return self._supervise()

    def _supervise(self) -> int:
        for event in self._journal.new():
            self.memory.hear(event)
        memory = self.memory
        self._read = self._log_size(memory.attempt)  # what was printed before has been seen
        predecessor = memory.predecessor
        if self._complete() and predecessor is None and not memory.under_way and not memory.open:
            self.say(
                f"nothing to do: {self.run.summary} is there, all {self.config.train.steps} steps are done (to train "
                "on: a larger train.steps; anew: another run.dir)"
            )
            return errors.OK
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                signal.signal(number, self._asked)
        self._refuse_another_host(predecessor)
        self.emit(SupervisorEvent(
            what="started" if predecessor is None else "took over", pid=os.getpid(), host=self.here,
            recipe=self.recipe, overrides=self.overrides, given=self.given, module=self.module,
        ))  # fmt: skip
        code, reason = errors.FAILED, "an unforeseen error"
        try:
            code, reason = self._until_the_end(predecessor)
            if code not in (errors.OK, errors.STOPPED):
                self.say(f"ended with code {code}: {reason}")
        except MegastableError as error:
            code, reason = error.code, str(error)
            raise
        finally:
            self.scout.close()
            last = SupervisorEvent(what="ended", pid=os.getpid(), host=self.here, code=code, reason=reason)
            self.emit(last)
            self._listen()
        return code

    def _until_the_end(self, predecessor: tuple[int, str] | None) -> tuple[int, str]:
        self._has_data = readable(self.config, self.run)
        attempt = self._take_over(predecessor)
        done: tuple[int, str] | None = None
        if attempt is None and self.memory.under_way:
            gone = Attempt(self.run, self.memory.attempt)
            done = self._settle(gone, self._end(gone, hung=False))
        elif attempt is None and self.memory.unmended is not None:
            # Its end was noted, and nobody came to do something about it.
            end = End.model_validate(self.memory.unmended)
            remedy = after_failure(self.memory.failures, hosts(self.given), self.config.stability.policy)
            done = self._mend(end, remedy, self.memory.skipped)
        while done is None:
            if self.signals:
                return errors.STOPPED, "stopped between two attempts"
            attempt = attempt or self._launch()
            done = self._settle(attempt, self._watch(attempt))
            attempt = None
        return done

    def _refuse_another_host(self, predecessor: tuple[int, str] | None) -> None:
        """What a supervisor on another host left running cannot be seen, nor ended, from this one."""
        if predecessor is None or predecessor[1] == self.here:
            return
        free = self._lock(self.run.root / ".lock")
        if free is None and Attempt.found(self.run) is None:
            raise ConfigError(
                f"run.dir={self.run.root}: the supervisor of before ran on {predecessor[1]}, and its processes still "
                "train: start this one there"
            )
        if free is not None:
            free.close()

    def _take_over(self, predecessor: tuple[int, str] | None) -> Attempt | None:
        attempt = Attempt.found(self.run)
        if attempt is None:
            if predecessor is not None:
                self.say(f"the supervisor of before (process {predecessor[0]}) and its processes are gone")
            return None
        self.say(f"attempt {attempt.number} runs already, and is watched from here on")
        if not self.memory.under_way:
            log = str(log_of(self.run, attempt.number))
            self.emit(Launched(attempt=attempt.number, command=[], log=log))
        self.wire.adopt(attempt.number)
        if predecessor is not None:
            text = f"the supervisor, process {predecessor[0]} on {predecessor[1]}, ended without a word"
            incident = self._open(Breakdown.CRASH, Cause.PROCESS, text, [])
            incident.reasons.append("its processes went on training: another supervisor took over")
            self._close(incident, "healed")
        return attempt

    def _launch(self) -> Attempt:
        number = self.memory.attempt + 1
        self._insist(lambda: self.wire.only(number))
        self._wait_for_release()
        log = log_of(self.run, number)
        arguments = command(self.run, number, self.module, self.recipe, self.overrides, self.given)
        # Before it is done: whoever comes after this process looks for it.
        self.emit(Launched(attempt=number, command=arguments, log=str(log.relative_to(self.run.root))))
        self._listen()
        self._read = 0
        self.patience.began()
        return Attempt.start(self.run, number, arguments, log)

    def _watch(self, attempt: Attempt) -> End:
        """Until it has ended, or was ended."""
        seen = time.monotonic()
        first_death = asked = None
        hung = False
        while attempt.look():
            time.sleep(LOOK)
            now = time.monotonic()
            elapsed, seen = now - seen, now
            if self.signals and asked is None:
                asked = now
                self.wire.want(stop=True)
                self.say("stopping: the ranks finish their step and save; once more ends them at once")
            self._listen()
            progress = self.wire.progress(attempt.number)
            self._proven(progress)
            if asked is not None and (self.signals > 1 or now - asked > self.config.supervise.stop_seconds):
                break
            if first_death is None and self._somebody_died(attempt):
                first_death = now
            if first_death is not None and now - first_death > self._grace(attempt):
                break
            if self.patience.look(progress, elapsed) and asked is None and first_death is None:
                hung = True
                break
        stacks = self.wire.stacks(attempt) if hung else []
        attempt.end()
        # Wherever else ranks of it still run: from now on they belong to the past.
        self._insist(lambda: self.wire.only(attempt.number + 1))
        self._failed = time.monotonic()
        if hung:
            self.emit(Hang(
                attempt=attempt.number, phase=self.patience.phase, waited=round(self.patience.waited, 1),
                limit=round(self.patience.limit, 1), step=progress.step if progress is not None else None,
                silent=attempt.stuck, stacks=stacks,
            ))  # fmt: skip
        return self._end(attempt, hung)

    def _somebody_died(self, attempt: Attempt) -> bool:
        """A rank has ended by an error or a signal, here or on another host; or the training has said its last word."""
        if self.memory.since or any(f.signal or f.code for f in attempt.fates.values()):
            return True
        return self.wire.anybody_died(attempt.number)

    def _grace(self, attempt: Attempt) -> float:
        """Seconds that the other ranks have, when one has ended."""
        orderly = (errors.BAD_INPUT, errors.STOPPED, errors.UNSTABLE, errors.NO_SPACE, errors.HANDOVER)
        known = all(f.code in (0, *orderly) for f in attempt.fates.values())
        return ORDERLY if known else self.config.supervise.grace_seconds

    # Why it ended

    def _end(self, attempt: Attempt, hung: bool) -> End:
        self._listen()
        progress = self.wire.progress(attempt.number)
        log = log_of(self.run, attempt.number)
        tail = ""
        if log.exists():
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_TAIL))
                tail = file.read().decode(errors="replace")
        end = end_of(
            self.memory.since, self.wire.last_words(attempt.number), attempt.fates, attempt.code, tail, progress,
            self.here,
        )  # fmt: skip
        if hung and (not end.certain):
            phase, p = self.patience.phase, self.patience
            text = f"no progress in {phase!r} for {p.waited:.0f} s, where {p.limit:.0f} s is the limit"
            text = "; ".join([text, *attempt.stuck])
            host = self.here if len(attempt.stuck) == 1 else None
            return End(
                hung=True, what=f"hang in {phase}", failure=text, host=host, step=end.step, cursor=end.cursor,
                trained=end.trained,
            )  # fmt: skip
        return end

    def _settle(self, attempt: Attempt, end: End) -> tuple[int, str] | None:
        """What follows: exit code and reason, or None: another attempt."""
        number, memory, policy = attempt.number, self.memory, self.config.stability.policy
        progress = self.wire.progress(number)
        clock = max(memory.clock, progress.step or 0 if progress is not None else 0)
        final = end.code in FINAL or (end.code == errors.BAD_INPUT and not end.trained)
        failure, remedy, skipped = None, None, list[Range]()
        if not final and not self.signals:
            failure = Failure(
                end.what, end.step if end.cursor is not None else None, end.host, clock, code=end.code
            )
            remedy = after_failure([*memory.failures, failure], hosts(self.given), policy)
            judged = end.code == errors.BAD_INPUT and self._has_data
            if judged and (problem := bad_data(self.config, self.run, lambda: self.signals > 0)):
                remedy = Remedy(Action.STOP, Cause.STORAGE, problem)  # another attempt would be refused
            if remedy.skip:
                skipped = self._skip(end)  # before it is noted that it was done
        silent = None if progress is None else round(max(0.0, time.time() - progress.time), 1)
        told = end.model_dump() | ({} if failure else {"what": ""})
        self.emit(Ended(attempt=number, clock=clock, silent=silent, skipped=skipped, **told))
        self._listen()
        if end.code == errors.OK:
            self._close_all("healed")
            return errors.OK, "complete"
        if end.code == errors.STOPPED:
            return errors.STOPPED, "stopped as asked, with a checkpoint"
        if end.code == errors.HANDOVER:
            why = "handed over: from a checkpoint of before"
            self.emit(Restart(attempt=number, reason=why, delay=0))
            return None
        if end.code == errors.SUPERSEDED:
            return errors.SUPERSEDED, "another supervisor has started the run again"
        if final:
            self._close_all("stopped")
            return end.code or errors.FAILED, self._advice(number, end)
        if remedy is None:
            return errors.FAILED, f"ended without a checkpoint: {end.failure}"
        return self._mend(end, remedy, skipped)

    def _mend(self, end: End, remedy: Remedy, skipped: list[Range]) -> tuple[int, str] | None:
        """Another attempt after a failure, if the policy says so."""
        memory, number = self.memory, self.memory.attempt
        self.say(f"attempt {number} failed: {end.failure}")
        evidence = [log_of(self.run, number), *sorted(folder_of(self.run, number).glob("rank-*"))]
        verdict = Breakdown.HANG if end.hung else Breakdown.CRASH
        incident = next(iter(memory.open.values()), None)
        paths = [str(path.relative_to(self.run.root)) for path in evidence]
        if incident is None:
            incident = self._open(verdict, remedy.cause, end.failure, paths)
        incident.actions.append(remedy.action)
        incident.reasons.append(
            f"{end.failure}: {remedy.reason}" if len(incident.actions) > 1 else remedy.reason
        )
        incident.cause, incident.evidence = remedy.cause, list(dict.fromkeys([*incident.evidence, *paths]))
        incident.kind = "lingering" if len(incident.actions) > 1 else "recoverable"
        incident.positions = sorted({*incident.positions, *skipped})
        if remedy.action is Action.STOP:
            incident.kind = "divergent"
            self._close(incident, "stopped")
            mendable = end.code == errors.NO_SPACE or remedy.cause is Cause.STORAGE
            code = end.code if mendable and end.code is not None else errors.UNSTABLE
            return code, f"{remedy.reason}. The last failure: {end.failure}. {self._advice(number, end)}"
        self._tell("attributed", incident)
        delay = pause(memory.failures, self.config.supervise.backoff_seconds)
        if end.code == errors.NO_SPACE:
            delay = max(delay, NO_ROOM)
        self.emit(
            Restart(attempt=number, reason=remedy.reason, delay=delay),
            say=f"starting again{f' in {delay:.0f} s' if delay else ''}: {remedy.reason}",
        )
        until = time.monotonic() + delay
        while time.monotonic() < until and not self.signals:
            time.sleep(LOOK)
            self._listen()
        return None

    def _advice(self, number: int, end: End) -> str:
        log = log_of(self.run, number)
        if end.code == errors.UNSTABLE:
            return f"the training gave up: read {self.run.incidents}/index.html and {log}"
        return f"read {log}"

    def _skip(self, end: End) -> list[Range]:
        """Put the samples of the step that failed on the ledger, for as long as the run goes."""
        if end.cursor is None:
            return []
        incident = next(iter(self.memory.open), self.memory.number + 1)
        found = samples_of(self.config, self.run, end, end.cursor, incident)
        if found.missing:
            self._insist(lambda: append_all(self.run.skips, found.entries))
        first, last = found.positions[0], found.positions[-1]
        self.say(f"  skipped in this and every later epoch: positions {first}-{last}")
        return ranges(found.positions)

    # Incidents of processes

    def _open(self, verdict: Breakdown, cause: Cause, failure: str, evidence: list[str]) -> Incident:
        self._listen()  # the training numbers its own
        memory = self.memory
        incident = Incident(
            number=memory.number + 1, step=memory.clock, onset=memory.clock, verdict=verdict,
            kind="recoverable", cause=cause, failure=failure, evidence=evidence,
        )  # fmt: skip
        self._tell("opened", incident)
        return incident

    def _close(self, incident: Incident, outcome: Outcome) -> None:
        incident.outcome = outcome
        self._tell("closed", incident)

    def _close_all(self, outcome: Outcome) -> None:
        for incident in list(self.memory.open.values()):
            self._close(incident, outcome)

    def _tell(self, what: str, incident: Incident, **fields: Any) -> None:
        summary = incident.model_dump(mode="json")
        self.emit(IncidentEvent(what=what, number=incident.number, summary=summary, **fields))
        self._listen()

    def _proven(self, progress: Progress | None) -> None:
        """What a running attempt shows of the incidents before it: training again, then beyond where it failed."""
        memory = self.memory
        if progress is None or progress.seconds is None or progress.step is None:
            return
        if memory.failed is not None and memory.open:
            # What another process noted is known by the wall clock only.
            passed = max(0.0, time.time() - memory.failed)
            if self._failed is not None:
                passed, self._failed = time.monotonic() - self._failed, None
            for incident in list(memory.open.values()):
                incident.seconds = round(incident.seconds + passed, 3)
                incident.steps_lost += max(0, memory.clock - max(memory.began, memory.rejected))
                self._tell("restarted", incident, step=memory.began)
                self.say(f"training again after {passed:.1f} s, from step {memory.began} on")
        for incident in list(memory.open.values()):
            if progress.step > incident.step:
                self._close(incident, "healed")

    # The disk, the journal and the lock

    def _insist(self, action: Callable[[], None]) -> None:
        """Do what the rest depends on, as soon as the disk allows. Raises SpaceError when told to stop."""
        told = False
        while True:
            try:
                return action()
            except (OSError, DataError) as error:
                if not told:
                    self.say(f"WARNING: {error}: make room; waiting for it")
                told = True
                if self.signals:
                    raise SpaceError(f"{error}: make room, and start again") from None
            time.sleep(LOOK)

    def _listen(self) -> None:
        """Take in what the journal says, show what the ranks print."""
        starts, events = self._journal.starts, self._journal.new()
        if self._journal.starts != starts:
            self.memory = (
                JournalMemory()
            )  # a person has mended it: it is heard again, but nobody is told again
        for event in events:
            self.memory.hear(event)
            if self._journal.starts == starts:
                self.audience.event(event)
        if self.memory.attempt:
            self._show_log(log_of(self.run, self.memory.attempt))
        self.audience.tick()
        self.scout.poll()

    def _show_log(self, log: Path) -> None:
        try:
            with log.open("rb") as file:
                file.seek(self._read)
                new = file.read(1 << 20)
        except OSError:
            return
        whole = new.rpartition(b"\n")[0]
        if whole:
            self._read += len(whole) + 1
            self.audience.output(whole.decode(errors="replace"))

    def _log_size(self, attempt: int) -> int:
        try:
            return log_of(self.run, attempt).stat().st_size
        except OSError:
            return 0

    def emit(self, event: Event, say: bool | str = False) -> None:
        """What this process does depends on it: a full disk is waited for. SpaceError when told to stop."""
        self.log.emit(event)
        if self.log.waiting:
            self._insist(self.log.flush)
        if say:
            self.say(say if isinstance(say, str) else event.line())

    def say(self, text: str) -> None:
        self.audience.say(text)

    def _complete(self) -> bool:
        try:
            done = json.loads(self.run.summary.read_text())["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return isinstance(done, int) and done >= self.config.train.steps

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep every other supervisor out."""
        path = self.run.root / ".supervisor.lock"
        held = self._lock(path)
        try:
            if held is None:
                raise ConfigError(
                    f"run.dir={self.run.root}: another supervisor watches this run: `python launch/supervise.py status "
                    f"{self.run.root}` tells which, and how it stands"
                )
            held.truncate(0)
            held.write(json.dumps({"pid": os.getpid(), "host": self.here}))
            held.flush()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written to: {error}") from None
        with held:
            yield

    def _wait_for_release(self) -> None:
        """Until no process of an attempt of before trains here: on other hosts they notice by themselves."""
        path, until = self.run.root / ".lock", time.monotonic() + self.config.supervise.hang_unknown
        while (free := self._lock(path)) is None:
            if self.signals:
                return
            if time.monotonic() > until:
                raise UnstableError(
                    f"run.dir={self.run.root}: a process that this supervisor cannot reach still holds {path}: end it"
                )
        free.close()

    def _lock(self, path: Path) -> IO[str] | None:
        try:
            return durable.hold(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be locked: {error}") from None
