"""Supervises a training run: starts the launcher, watches it, finds out why it ended, and restarts it.

It decides by the same policy as the training (guard's policy), and keeps no state of its own: killed at any moment
and restarted, it resumes from the journal and takes over running processes. It imports neither torch nor deepspeed. It
tells the ranks what it wants through files (run/rank_ipc.py), and hears how they are through its store.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from types import FrameType

from megastable.base import activity, errors
from megastable.base.errors import ConfigError, MegastableError
from megastable.base.process import SAME, release_stops
from megastable.cluster.fleet import Attempt, Fleet, KernelView
from megastable.cluster.launcher import TrainingCommand
from megastable.cluster.store import Store
from megastable.cluster.this_host import STOPPED
from megastable.config.supervise import redact_override
from megastable.config.tree import RunConfig
from megastable.data.skip_ledger import append_entries
from megastable.data.skips import Range, ranges_of
from megastable.run.directory import RunDirectory, read_object
from megastable.run.events.event import Event, read_whole
from megastable.run.events.supervisor_events import Ended, Hang, Launched, Restart, SupervisorEvent
from megastable.run.rank_ipc import Beat, Progress, folder_of, log_of
from megastable.supervise import side_process
from megastable.supervise.exit_cause import AttemptEvidence, End, find_exit_cause, find_first_silent
from megastable.supervise.gathering import Gathering, RunExit
from megastable.supervise.hangs import (
    HangDetector,
    RankView,
    Suspects,
    find_suspects,
    find_waiting_for_store,
)
from megastable.supervise.locks import nobody_trains, only_supervisor, wait_until_nobody_trains
from megastable.supervise.machine_recorder import MachineRecorder
from megastable.supervise.process_incidents import ProcessIncidents, find_bad_data, find_failed_samples
from megastable.supervise.rank_files import RankFiles, StorageProbe
from megastable.supervise.restart_policy import Failure, choose_remedy, exclusions_after, pause_seconds
from megastable.supervise.slow_hosts import SlowHosts, take_work_reports
from megastable.supervise.supervisor_journal import Listener, SupervisorJournal, end_of_log
from megastable_guard.actions import Action, Cause, Remedy
from megastable_guard.incident import Breakdown

LOOK = 0.2  # seconds between polls: a dead rank waits about a second for the launcher to notice
# Seconds from the end of the first rank to that of the last, if all end for a reason they all know: ...
ORDERLY = 30.0
KNOWN = (errors.OK, errors.BAD_INPUT, errors.STOPPED, errors.UNSTABLE, errors.NO_SPACE, errors.HANDOVER)
NO_ROOM = 60.0  # seconds between two tries on a full disk
LOG_TAIL = 64_000


@dataclass(frozen=True)
class StartAgain:
    """Another attempt follows, in `delay` seconds. told: whether to print that."""

    reason: str
    delay: float
    told: bool


class Supervisor:
    """Supervises one run. recipe, overrides: for the training; given: for deepspeed's launcher;
    module: to start; fleet: what it runs on; interface: that the store listens on;
    reason: why the run goes on as it does, for its journal."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        listener: Listener,
        training: TrainingCommand,
        fleet: Callable[[Store], Fleet],
        interface: str = "127.0.0.1",
        reason: Event | None = None,
    ) -> None:
        self.config, self.run, self.say, self.reason = config, run, listener.print_line, reason
        self.store = Store(run, interface)
        self.fleet = fleet(self.store)
        self.training = replace(
            training, overrides=[redact_override(override_text) for override_text in training.overrides]
        )
        self.here = socket.gethostname()
        self.stopping, self.signals = False, 0  # hours that have passed are no signal
        self.signalled = self.asked_kernel = -inf
        self.until = inf if config.run.max_hours is None else time.monotonic() + 3600 * config.run.max_hours
        self.journal = SupervisorJournal(run, listener, lambda: self.stopping)
        hurry = self.journal.hurry
        self.gathering = Gathering(config, self.fleet, self.journal, listener.print_line, hurry, self._look)
        self.slow_hosts = SlowHosts(config, self.store, self.fleet, self.journal, self.gathering)
        self.machines = MachineRecorder(run, self.fleet, listener.print_line)
        self.again = ""  # why the next attempt has other hosts, if this one was asked to stop for that
        self.incidents = ProcessIncidents(self.journal)
        self.hangs = HangDetector(config.supervise)
        self.storage = StorageProbe(run.root / ".storage")
        self.ranks = RankFiles(run, listener.print_line)
        beside = (config, run, training.recipe, self.training.overrides, listener.print_line)
        self.prescan = side_process.build_look_ahead(*beside)
        self.evaluation = side_process.build_evaluation(*beside)
        # Whether this host could read the corpora at the start: later trouble is damage.
        self.has_data = False

    # Attempts

    def supervise_run(self) -> int:
        """Run until the training is complete, stopped, or beyond repair. Returns the exit code, one of errors.py.

        Raises ConfigError if another supervisor runs here.
        """
        with only_supervisor(self.run, self.here):
            self.journal.catch_up()
            run_state = self.journal.state
            is_evaluated = self.config.eval.command is None or run_state.evaluated >= self.config.train.steps
            if self._complete() and run_state.predecessor is None and is_evaluated:
                self.say(
                    f"nothing to do: {self.run.summary} is there, all {self.config.train.steps} steps are done (to "
                    "train on: a larger train.steps; from scratch: another run.dir)"
                )
                return errors.OK
            with self.store:
                return self._supervise(run_state.predecessor)

    def _supervise(self, predecessor: tuple[int, str] | None) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                signal.signal(number, self._asked)
        release_stops()
        self._refuse_another_host(predecessor)
        if self.reason is not None:
            self.journal.journal_event(self.reason)
        self.journal.journal_event(SupervisorEvent(
            what="started" if predecessor is None else "took over", pid=os.getpid(), host=self.here,
            **asdict(self.training), seconds=round(activity.process_age(), 3),
        ))  # fmt: skip
        end = RunExit(errors.FAILED, "an unforeseen error")
        try:
            end = self._until_the_end(predecessor)
            if end.code == errors.OK:
                end = self._finish_evaluation(end)
            if end.code not in (errors.OK, errors.STOPPED):
                self.say(f"ended with code {end.code}: {end.reason}")
        except MegastableError as error:
            end = RunExit(error.code, str(error))
            raise
        finally:
            self.prescan.close()
            self.machines.close()
            self.evaluation.close()
            self.fleet.close(end.code)
            self.journal.journal_event(SupervisorEvent(
                what="ended", pid=os.getpid(), host=self.here, code=end.code, reason=end.reason
            ))  # fmt: skip
            self.journal.read_new_events()
        return end.code

    def _until_the_end(self, predecessor: tuple[int, str] | None) -> RunExit:
        self.has_data = not find_bad_data(self.config, self.run, lambda: True)
        attempt = self._take_over(predecessor)
        run_state = self.journal.state
        what_follows: RunExit | StartAgain | None = None
        if attempt is None and run_state.under_way:
            left_attempt = self.fleet.find_ended_attempt(run_state.attempt, run_state.hosts)
            what_follows = self._settle(left_attempt, self._end(left_attempt))
        elif attempt is None and (attempt_end := run_state.unmended) is not None:
            # Its end was journaled, but not acted on.
            remedy = choose_remedy(run_state.failures, len(self.fleet.names), self.config.stability.policy)
            what_follows = self._mend(attempt_end, remedy, run_state.failed_attempts[-1].event.skipped)
        elif attempt is None and self._complete():
            what_follows = RunExit(errors.OK, "complete")  # but for the evaluation of its last checkpoint
        while not isinstance(what_follows, RunExit):
            if what_follows is not None:
                self._pause(what_follows)
            if self.stopping:
                return RunExit(errors.STOPPED, "stopped between two attempts")
            if attempt is None:
                next_hosts = self.gathering.gather_hosts()
                if isinstance(next_hosts, RunExit):
                    return next_hosts
                attempt = self._launch(next_hosts)
            what_follows = self._settle(attempt, self._watch(attempt))
            attempt = None
        return what_follows

    def _refuse_another_host(self, predecessor: tuple[int, str] | None) -> None:
        """Raise for processes of a supervisor on another host: they can be neither seen nor ended from here."""
        if predecessor is None or predecessor[1] == self.here or len(self.fleet.names) > 1:
            return  # of several hosts, the agents see them
        if not nobody_trains(self.run) and self.fleet.find_running_attempt(()) is None:
            raise ConfigError(
                f"run.dir={self.run.root}: the supervisor of before ran on {predecessor[1]}, and its processes still "
                "train: start this one there"
            )

    def _take_over(self, predecessor: tuple[int, str] | None) -> Attempt | None:
        attempt = self.fleet.find_running_attempt(self.journal.state.hosts)
        if attempt is None:
            if predecessor is not None:
                self.say(f"the supervisor of before (process {predecessor[0]}) and its processes are gone")
            return None
        self.say(f"attempt {attempt.number} runs already, and is watched from here on")
        if not self.journal.state.under_way:
            log_path = str(log_of(self.run, attempt.number))
            self.journal.journal_event(self._launched(attempt.number, attempt.names, [], log_path))
        self.again = self.ranks.adopt_control(attempt.number).again
        self.store.begin_attempt(attempt.number)
        if predecessor is not None:
            text = f"the supervisor, process {predecessor[0]} on {predecessor[1]}, ended without a word"
            incident = self.incidents.open_incident(Breakdown.CRASH, Cause.PROCESS, text)
            incident.reasons.append("its processes went on training: another supervisor took over")
            self.incidents.close_incident(incident, "healed")
        return attempt

    def _launch(self, hosts: Sequence[str]) -> Attempt:
        number, self.again = self.journal.state.attempt + 1, ""
        self.journal.retry_until_written(lambda: self.ranks.allow_only_attempt(number))
        wait_until_nobody_trains(self.run, self.config.supervise.hang_unknown, lambda: self.stopping)
        # Journaled first: the next supervisor looks for it.
        log_path = str(log_of(self.run, number).relative_to(self.run.root))
        asked = self.training
        words = [*asked.given, "--module", asked.module, asked.recipe, *asked.overrides]
        self.journal.journal_event(self._launched(number, hosts, words, log_path))
        self.journal.read_new_events()
        self.store.begin_attempt(number)
        self.hangs.begin_attempt()
        return self.journal.retry_until_written(lambda: self.fleet.start_attempt(number, hosts))

    def _launched(self, number: int, hosts: Sequence[str], words: list[str], log: str) -> Launched:
        return Launched(
            attempt=number, command=words, log=log, hosts=list(hosts), wanted=self.gathering.wanted,
            ahead=round(self.fleet.clock_offset(hosts[0]), 3),
        )  # fmt: skip

    def _watch(self, attempt: Attempt) -> End:
        """Wait until the attempt has ended, or was ended."""
        last_look = time.monotonic()
        first_death = asked_time = None
        self.slow_hosts.begin_attempt()
        self.machines.begin_attempt()
        is_hung, progress = False, None
        while attempt.poll_processes():
            time.sleep(LOOK)
            now = time.monotonic()
            elapsed_seconds, last_look = now - last_look, now
            self._hear_launcher(attempt)
            if self.stopping and asked_time is None:
                asked_time = now
                self.ranks.tell_ranks(stop=True)
                self.say("stopping: the ranks finish their step and save; once more ends them at once")
            self._look()
            progress = self.ranks.read_progress(attempt.number)
            self.incidents.judge_open_incidents(progress)
            work_reports = take_work_reports(self.store, attempt.number)
            self.machines.add_work_reports(work_reports)
            self.slow_hosts.add_work_reports(work_reports)
            if asked_time is None and (restart_reason := self._other_hosts(attempt, progress)):
                asked_time, self.again = now, restart_reason
                self.ranks.tell_ranks(stop=True, again=restart_reason)
                self.say(f"{restart_reason}: the ranks finish their step and save, to begin again")
            is_late_to_stop = asked_time is not None and now - asked_time > self.config.supervise.stop_seconds
            if is_late_to_stop or (asked_time is not None and self.signals > 1):
                break
            if first_death is None and self._somebody_died(attempt):
                first_death = now
            if first_death is not None and now - first_death > self._grace(attempt):
                break
            # A person's wish has a limit of its own.
            by_our_wish = asked_time is None or bool(self.again)
            if attempt.gone and by_our_wish:
                break
            is_late = self.hangs.detect_hang(progress, elapsed_seconds) or self._somebody_stopped(attempt)
            if is_late and by_our_wish and first_death is None and not self._storage_stalls():
                is_hung = True
                break
        stack_files, hang_suspects = list[str](), Suspects()
        if is_hung:
            stack_files, mute_ranks = self.ranks.collect_stacks(attempt)
            hang_suspects = find_suspects(self._views(mute_ranks))
        attempt.kill_all()
        # Ranks of it on other hosts must end now, too.
        self.journal.retry_until_written(lambda: self.ranks.allow_only_attempt(attempt.number + 1))
        self.incidents.failure_noticed()
        if is_hung:
            self.journal.journal_event(Hang(
                attempt=attempt.number, phase=self.hangs.phase, waited=round(self.hangs.waited, 1),
                limit=round(self.hangs.limit, 1), step=progress.step if progress is not None else None,
                silent=hang_suspects.told, stacks=stack_files,
            ))  # fmt: skip
        return self._end(attempt, hang_suspects if is_hung else None)

    def _hear_launcher(self, attempt: Attempt) -> None:
        if not self.signals and attempt.asked:
            self.say("stopping: the launcher was asked to, by a signal")
            self._asked()

    def _other_hosts(self, attempt: Attempt, progress: Progress | None) -> str:
        """Why it would be better to begin again on other hosts; empty: it would not."""
        if host_count := self.gathering.count_possible_hosts(attempt.number, attempt.names):
            return f"{host_count} hosts can take part"
        return self.slow_hosts.find_replacement(attempt, progress)

    def _somebody_stopped(self, attempt: Attempt) -> bool:
        """Whether a rank is silent for as long as a step may take at least, and the kernel says that it is stopped. It
        goes on by itself in no phase, however long that may take."""
        now, limit = time.monotonic(), self.config.supervise.hang_floor
        silent = {r.rank for r in list(self.store.ranks.values()) if r.closed is None and now - r.at > limit}
        if not silent or now < self.asked_kernel + limit / 2:
            return False
        self.asked_kernel = now
        return any(
            STOPPED in view.text for rank, view in attempt.read_kernel_views().items() if rank in silent
        )

    def _storage_stalls(self) -> bool:
        """Whether the run directory, or the store of the data, does not answer: then nobody hangs, all wait for it, and
        the clock begins again."""
        waiting_rank = find_waiting_for_store(self._views({}))
        if waiting_rank is not None:
            self.say(f"WARNING: rank {waiting_rank} waits for data from an object store, and all wait for it")
            self.hangs.reset_wait()
            return True
        seconds = self.storage.stalled_seconds()
        if seconds is None:
            return False
        self.say(f"WARNING: {self.run.root} has not answered for {seconds:.0f} s: the ranks may wait for it")
        self.hangs.reset_wait()
        return True

    def _views(self, mute: Mapping[int, KernelView]) -> dict[int, RankView]:
        """What is known of every rank; mute: the kernel's view of those that do not answer."""
        now = time.monotonic()
        rank_views = {}
        for heard in list(self.store.ranks.values()):
            last_beat = Beat.model_validate(heard.beat) if heard.beat else None
            rank_views[heard.rank] = RankView(
                host=self.fleet.name_of_host(heard.host), silent=now - heard.at, closed=heard.closed is not None,
                kernel=mute[heard.rank].text if heard.rank in mute else "",
                activity=last_beat.activity if last_beat else "",
                lasted=last_beat.lasted if last_beat else 0.0, entered=last_beat.entered if last_beat else None,
            )  # fmt: skip
        # A rank may be stopped before it has found a new supervisor.
        return rank_views | {
            rank: RankView(host=kernel_view.host or self.here, kernel=kernel_view.text)
            for rank, kernel_view in mute.items() if rank not in rank_views
        }  # fmt: skip

    def _look(self) -> None:
        if not self.stopping and time.monotonic() > self.until:
            self.say(f"stopping: the {self.config.run.max_hours:g} hours of run.max_hours have passed")
            self.stopping = True
        if not self.signals and (host_name := self.fleet.find_host_asked_to_stop()) is not None:
            self.say(f"stopping: the agent on {host_name} was asked to (SIGTERM)")
            self._asked()
        self.journal.read_new_events()
        self.prescan.poll()
        self.evaluation.poll()

    def _finish_evaluation(self, end: RunExit) -> RunExit:
        """Wait for the evaluation of the last checkpoint. A signal ends the wait; the next start goes on with it."""
        self.prescan.close()
        if self.evaluation.unfinished:
            self.say("the training is complete; waiting for the evaluation of its last checkpoint")
            self.evaluation.wait_until_done(self._look, lambda: self.stopping)
        if not self.evaluation.unfinished:
            return end
        reason = f"complete, but for its last checkpoint's evaluation: {self.run.resuming} goes on with it"
        self.say(f"stopped: {reason}")
        return RunExit(errors.STOPPED, reason)

    def _somebody_died(self, attempt: Attempt) -> bool:
        """Whether a rank has ended by error or signal, on any host, or the training has journaled its end."""
        # The launcher of one host may end while the others wait for it in the rendezvous. After a stop it ends with the
        # code of its first rank.
        return bool(
            self.journal.state.since_launch
            or (attempt.code and not self.stopping)
            or any(rank_fate.signal or rank_fate.code for rank_fate in attempt.fates.values())
            or any(folder_of(self.run, attempt.number).glob("rank-*.json"))
        )

    def _grace(self, attempt: Attempt) -> float:
        """Seconds for the other ranks to end after the first."""
        # Of a rank that ends as it starts, nobody may have seen more than its launcher's code.
        exit_codes = [rank_fate.code for rank_fate in attempt.fates.values()] or [attempt.code]
        is_known = self.journal.state.since_launch or all(exit_code in KNOWN for exit_code in exit_codes)
        return ORDERLY if is_known else self.config.supervise.grace_seconds

    # Causes and consequences

    def _end(self, attempt: Attempt, hang: Suspects | None = None) -> End:
        self.journal.read_new_events()
        witness_host, log_path = attempt.find_failed_log()
        progress = self.ranks.read_progress(attempt.number)
        # By one clock: an hour's difference must not make the last one the first.
        last_words = [
            rank_words.model_copy(update={"time": rank_words.time - self.fleet.clock_offset(rank_words.host)})
            for rank_words in self.ranks.read_last_words(attempt.number)
        ]
        heard_ranks, spoke = list(self.store.ranks.values()), {rank_words.rank for rank_words in last_words}
        first_silent = find_first_silent(heard_ranks, spoke, self.fleet.name_of_host, time.monotonic())
        attempt_end = find_exit_cause(AttemptEvidence(
            list(self.journal.state.since_launch), last_words, attempt.fates, attempt.code,
            end_of_log(log_path, LOG_TAIL), progress, witness_host, attempt.gone, self.fleet.name_of_host, first_silent,
        ))  # fmt: skip
        return attempt_end if hang is None else attempt_end.by_hang(self.hangs, hang)

    def _settle(self, attempt: Attempt, end: End) -> RunExit | StartAgain:
        """Act on the end of an attempt, which is journaled already."""
        number, run_state, policy = attempt.number, self.journal.state, self.config.stability.policy
        progress = self.ranks.read_progress(number)
        clock = max(run_state.clock, progress.step or 0 if progress is not None else 0)
        remedy, skipped_ranges = None, list[Range]()
        if not end.final and not self.stopping:
            step = end.step if end.cursor is not None else None
            host = None if run_state.does_not_fit(end) else end.host
            failure = Failure(end.what, step, host, clock, code=end.code)
            remedy = choose_remedy([*run_state.failures, failure], len(self.fleet.names), policy)
            judge_data = end.code == errors.BAD_INPUT and self.has_data
            if judge_data and (data_problem := find_bad_data(self.config, self.run, lambda: self.stopping)):
                remedy = Remedy(Action.STOP, Cause.STORAGE, data_problem)  # another attempt would be refused
            if remedy.skip:
                skipped_ranges = self._skip(end)  # before it is journaled as done
        silent_seconds = None
        if progress is not None:
            since_progress = time.time() - progress.time + self.fleet.clock_offset(progress.host)
            silent_seconds = round(max(0.0, since_progress), 1)
        end_fields = end.model_dump() | ({} if remedy else {"what": ""})
        self.journal.journal_event(
            Ended(attempt=number, clock=clock, silent=silent_seconds, skipped=skipped_ranges, **end_fields)
        )
        self.journal.read_new_events()
        if end.code == errors.OK:
            self.incidents.close_all("healed")
            return RunExit(errors.OK, "complete")
        if end.code == errors.STOPPED and self.again and not self.stopping:
            return StartAgain(self.again, delay=0, told=False)
        if end.code == errors.STOPPED:
            return RunExit(errors.STOPPED, "stopped as asked, with a checkpoint")
        if end.code == errors.HANDOVER:
            for host in filter(self.gathering.can_do_without, end.faulty):
                self.gathering.leave_out_faulty_host(host, "computes wrong")
            return StartAgain("handed over: from a checkpoint of before", delay=0, told=False)
        if end.code == errors.SUPERSEDED:
            return RunExit(errors.SUPERSEDED, "another supervisor has started the run again")
        if end.final:
            self.incidents.close_all("stopped")
            return RunExit(end.code or errors.FAILED, self._advice(number, end))
        if remedy is None:
            # Whatever it was, it ended a run that was to end: the next start finds out whether it comes back.
            exit_code = errors.NO_SPACE if end.code == errors.NO_SPACE else errors.STOPPED
            return RunExit(exit_code, f"stopped as asked, but without a new checkpoint: {end.failure}")
        return self._mend(end, remedy, skipped_ranges)

    def _mend(self, end: End, remedy: Remedy, skipped: Sequence[Range]) -> RunExit | StartAgain:
        """Start another attempt after a failure, if the policy says so."""
        number = self.journal.state.attempt
        self.say(f"attempt {number} failed: {end.failure}")
        evidence = [log_of(self.run, number), *sorted(folder_of(self.run, number).glob("rank-*"))]
        run_state = self.journal.state
        host_bars = exclusions_after(end, remedy, run_state.bars, self.config.supervise.cool_off, time.time())
        for host, host_bar in host_bars.items():
            if host_bar.wholly and self.gathering.can_do_without(host):
                remedy = Remedy(Action.RESTART, Cause.HARDWARE, f"{remedy.reason}, and is left out")
            if host not in run_state.newly_left_out:  # by a supervisor that died after that
                self.gathering.leave_out(host, host_bar, end.what)
        self.incidents.journal_remedy(
            end, remedy, skipped, [str(path.relative_to(self.run.root)) for path in evidence]
        )
        if remedy.action is Action.STOP:
            is_mendable = end.code == errors.NO_SPACE or remedy.cause is Cause.STORAGE
            exit_code = end.code if is_mendable and end.code is not None else errors.UNSTABLE
            if remedy.cause is Cause.HARDWARE:
                exit_code = errors.HOST_GONE
            reason = f"{remedy.reason}. The last failure: {end.failure}. {self._advice(number, end)}"
            return RunExit(exit_code, reason)
        restart_delay = pause_seconds(self.journal.state.failures, self.config.supervise.backoff_seconds)
        if end.code == errors.NO_SPACE:
            restart_delay = max(restart_delay, NO_ROOM)
        return StartAgain(remedy.reason, restart_delay, told=True)

    def _pause(self, again: StartAgain) -> None:
        """Journal the coming attempt, and wait until it is due."""
        when_text = f" in {again.delay:.0f} s" if again.delay else ""
        self.journal.journal_event(
            Restart(attempt=self.journal.state.attempt, reason=again.reason, delay=again.delay),
            say=again.told and f"starting again{when_text}: {again.reason}",
        )
        end_time = time.monotonic() + again.delay
        while time.monotonic() < end_time and not self.stopping:
            time.sleep(LOOK)
            self._look()

    def _advice(self, number: int, end: End) -> str:
        log_path = log_of(self.run, number)
        if end.code == errors.UNSTABLE:
            return f"the training gave up: read {self.run.incidents}/index.html and {log_path}"
        return f"read {log_path}"

    def _skip(self, end: End) -> list[Range]:
        """Put the samples of the failed step on the ledger, for the rest of the run."""
        if end.cursor is None:
            return []
        run_state = self.journal.state
        incident_number = next(iter(run_state.open), run_state.number + 1)
        positions, missing = find_failed_samples(self.config, self.run, end, end.cursor, incident_number)
        if missing:
            self.journal.retry_until_written(lambda: append_entries(self.run.skips, missing))
        self.say(f"  skipped in this and every later epoch: positions {positions[0]}-{positions[-1]}")
        return ranges_of(positions)

    def _complete(self) -> bool:
        """Whether the training is over, and nothing of it is left to mend."""
        run_state, done_steps = (
            self.journal.state,
            read_whole(read_object(self.run.summary).get("steps")) or 0,
        )
        return done_steps >= self.config.train.steps and not run_state.under_way and not run_state.open

    def _asked(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """A signal to this process, or to another one of the run, has asked for a stop."""
        self.stopping, now = True, time.monotonic()
        if now - self.signalled > SAME:
            self.signalled, self.signals = now, self.signals + 1
