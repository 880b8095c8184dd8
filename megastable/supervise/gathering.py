"""Gathers the hosts of the next attempt: waits for those that are missing, takes spares or fewer hosts instead of them,
and notices when a run on fewer hosts can grow again (`choose_lineup` decides).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from megastable.base import errors
from megastable.base.errors import ConfigError
from megastable.cluster.fleet import Fleet
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.run.events.supervisor_events import HostLeftOut, HostProven, HostsAwaited
from megastable.supervise.restart_policy import MOST, HostBar, in_force, next_exclusion
from megastable.supervise.supervisor_journal import SupervisorJournal

LOOK = 0.2  # seconds between polls
SHOWN = 5.0  # ... of waiting for hosts before it is said
GROWTH = 5.0  # ... between two looks whether a smaller run can grow
UNFIT = 2  # failures of attempts on so many hosts before their first step, after which they are too few
# What ssh says of a host that will not come by waiting.
HOPELESS = re.compile(
    "could not resolve|permission denied|host key verification|no such identity", re.IGNORECASE
)


@dataclass(frozen=True)
class RunExit:
    """The run is over. code: of errors.py."""

    code: int
    reason: str


class Gathering:
    """Of one run. stopped: whether the run is to stop; look: to be called at every poll. Raises ConfigError if no host
    is left to train."""

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        journal: SupervisorJournal,
        say: Callable[[str], None],
        stopped: Callable[[], bool],
        look: Callable[[], None],
    ) -> None:
        self.config, self.fleet, self.journal, self.say = config, fleet, journal, say
        self.stopped, self.look = stopped, look
        self.wanted = len(fleet.names) - config.supervise.spares
        if self.wanted < 1:
            raise ConfigError(
                f"supervise.spares={config.supervise.spares}: of {len(fleet.names)} hosts none is left to train"
            )
        slots = {host_name: fleet.count_ranks([host_name]) for host_name in fleet.names}
        if config.supervise.spares and len(set(slots.values())) > 1:
            slots_text = ", ".join(f"{host_name} {slot_count}" for host_name, slot_count in slots.items())
            raise ConfigError(
                f"supervise.spares: any host must be able to take any place, but their slots differ: {slots_text}"
            )
        self.told = set[str]()  # warnings of hosts
        self._looked = -inf
        self._more_since = inf  # more hosts could take part
        self._counted = set[str]()  # hosts that the run was asked to grow by
        self._away = dict[str, float]()  # hosts that are not there, since when
        self._away_told = set[str]()

    def gather_hosts(self) -> tuple[str, ...] | RunExit:
        """Those of the next attempt, with nothing of earlier ones on them; the end if they stay away. Raises
        ConfigError."""
        supervise_config, start_time, said_reasons = self.config.supervise, time.monotonic(), dict[str, str]()
        shrink_after = supervise_config.shrink_after
        if self._counted and shrink_after is not None:
            shrink_after = min(shrink_after, SETTLE)  # the others trained without them
        while True:
            run_state = self.journal.state
            missing_reasons = self.fleet.list_missing_hosts(run_state.attempt)
            waited_seconds = time.monotonic() - start_time
            self._prove(missing_reasons)
            barred_hosts = in_force(run_state.bars, time.time())
            missed_seconds = max(waited_seconds, self._missed(missing_reasons))
            chosen_hosts = self._lineup(missing_reasons, barred_hosts, missed_seconds, shrink_after)
            if chosen_hosts and self._checked(chosen_hosts):
                break
            away_reasons = {name: "left out" for name in self.fleet.names if barred_hosts.get(name)}
            away_reasons |= missing_reasons
            away_names = ", ".join(away_reasons)
            if self.stopped():
                return RunExit(errors.STOPPED, f"stopped while waiting for {away_names}")
            if waited_seconds > supervise_config.wait_for_hosts and not chosen_hosts:
                away_text = "; ".join(f"{host_name}: {reason}" for host_name, reason in away_reasons.items())
                end_reason = f"{away_names} did not come within {waited_seconds:.0f} s ({away_text})"
                return RunExit(errors.HOST_GONE, end_reason)
            self._tell(missing_reasons, waited_seconds, said_reasons)
            time.sleep(LOOK)
            self.look()
        for host_name in sorted(self._counted - set(chosen_hosts)):
            self.strike_host(host_name, False, "it was gone again when the run was to grow by it")
        self._more_since, self._counted = inf, set()
        self._announce(chosen_hosts, bool(said_reasons))
        return chosen_hosts

    def _missed(self, missing: Collection[str]) -> float:
        """For how many seconds all of these have been away; 0 if there are none."""
        now = time.monotonic()
        self._away = {host_name: self._away.get(host_name, now) for host_name in missing}
        self._away_told &= self._away.keys()
        return min((now - away_since for away_since in self._away.values()), default=0.0)

    def _lineup(
        self, missing: Collection[str], barred: Mapping[str, bool], waited: float, shrink_after: float | None
    ) -> tuple[str, ...]:
        there = [name for name in self.fleet.names if name not in missing]
        last = self.journal.state.hosts
        # An attempt on fewer hosts does not say who is wanted.
        last = last if len(last) == self.wanted and set(last) <= set(self.fleet.names) else ()
        names, wanted = self.fleet.names, self.wanted
        return choose_lineup(names, wanted, there, barred, last, waited, shrink_after, self._fits)

    def _fits(self, names: Sequence[str]) -> bool:
        # What does not fit on more hosts does not fit on fewer.
        if any(count >= UNFIT for size, count in self.journal.state.unfit.items() if size >= len(names)):
            return False
        try:
            deepspeed_json.build_deepspeed_json(self.config, self.fleet.count_ranks(names))
        except ConfigError:
            return False
        return True

    def can_do_without(self, host: str) -> bool:
        """Whether others could train if this one were left out, and all of them were there."""
        return bool(self._without(host, (), self.config.supervise.shrink_after))

    def _without(self, host: str, missing: Collection[str], shrink_after: float | None) -> tuple[str, ...]:
        barred_hosts = in_force(self.journal.state.bars, time.time()) | {host: True}
        return self._lineup(missing, barred_hosts, inf, shrink_after)

    def leave_out(self, host: str, bar: HostBar, reason: str) -> None:
        """Journal it."""
        self.journal.journal_event(HostLeftOut(
            host=host, until=round(bar.until, 3), wholly=bar.wholly, strikes=bar.strikes, burn_in=bar.burn_in,
            reason=reason,
        ))  # fmt: skip
        self.journal.read_new_events()

    def list_spares(self, attempt: int, names: Sequence[str]) -> list[str]:
        """Hosts that could take the place of one of the attempt's `names` at once: they are there, and have not failed
        of late."""
        missing = self.fleet.list_missing_hosts(attempt - 1)
        barred = in_force(self.journal.state.bars, time.time())
        return [name for name in self.fleet.names if name not in {*names, *missing, *barred}]

    def strike_host(self, host: str, wholly: bool, reason: str, least: int = 1, burn_in: float = 0.0) -> None:
        """Leave it out for longer than the last time. least, burn_in: of `next_exclusion`."""
        bar_before, cool_off = self.journal.state.bars.get(host), self.config.supervise.cool_off
        host_bar = next_exclusion(bar_before, wholly, cool_off, time.time(), least, burn_in)
        self.leave_out(host, host_bar, reason)

    def leave_out_faulty_host(self, host: str, reason: str) -> None:
        """Leave it out for as long as can be, as nobody notices when it is repaired, and until a burn-in has passed."""
        self.strike_host(
            host, True, reason, MOST + 1, self.config.supervise.burn_in if self.fleet.burns_in else 0.0
        )

    def _prove(self, missing: Collection[str]) -> None:
        """Burn in hosts that computed wrong and whose time is over. missing: hosts that cannot be asked."""
        for host, bar in list(self.journal.state.bars.items()):
            if not bar.burn_in or time.time() < bar.until or host in missing or host not in self.fleet.names:
                continue
            burn_in_answer = self.fleet.poll_burn_in(host, bar.burn_in)
            if burn_in_answer is None:
                continue
            if burn_in_answer.unmade:
                self._warn_once(f"{host}: no burn-in: {burn_in_answer.unmade}")
            elif burn_in_answer.found:
                self.leave_out_faulty_host(host, burn_in_answer.found)
            else:
                self.journal.journal_event(HostProven(host=host, seconds=bar.burn_in))
                self.journal.read_new_events()

    def count_possible_hosts(self, attempt: int, names: Sequence[str]) -> int:
        """How many hosts could take part, if those are more than the attempt's `names`, and have been for a while; else
        0. Poll often: it also looks after the hosts that do not train. Newcomers are checked first."""
        now = time.monotonic()
        if len(names) == len(self.fleet.names) or now - self._looked < GROWTH:
            return 0
        self._looked = now
        # Nothing of the attempts before this one is left on them, which those of this one have said when they began.
        missing = self.fleet.list_missing_hosts(attempt - 1)
        self._prove({*missing, *names})
        self._stand_by({name: reason for name, reason in missing.items() if name not in names})
        # One that trains although it failed before does so in a larger run as well.
        barred = {name: True for name in in_force(self.journal.state.bars, time.time()) if name not in names}
        wider = self._lineup(missing, barred, inf, 0.0)
        if len(wider) <= len(names):
            self._more_since = inf
            return 0
        self._more_since = min(self._more_since, now)
        new_hosts = [name for name in wider if name not in names]
        if now - self._more_since < SETTLE or self._refused(new_hosts, wider):
            return 0
        self._counted = set(new_hosts)
        return len(wider)

    def _refused(self, new: Sequence[str], names: Sequence[str]) -> bool:
        """Whether a preflight of `names` refuses one of the new hosts; it is left out then."""
        findings = self.fleet.check_hosts(names, self.stopped)
        refused_texts = {f.host: f.text for f in findings if f.severity == "refuse" and f.host in new}
        for host, text in refused_texts.items():
            self.say(f"{host}: {text}: it is left out")
            self.strike_host(host, True, text)
        return bool(refused_texts)

    def _stand_by(self, away: Mapping[str, str]) -> None:
        """Say which of the hosts that do not train have gone, and which are back: a spare that is not there is none."""
        now = time.monotonic()
        for host_name, away_reason in away.items():
            if now - self._away.setdefault(host_name, now) >= SETTLE and host_name not in self._away_told:
                self._away_told.add(host_name)
                self.say(f"WARNING: {host_name}, which stands by, is not there: {away_reason}")
        for host_name in sorted(self._away.keys() - away.keys()):
            del self._away[host_name]
            if host_name in self._away_told:
                self._away_told.remove(host_name)
                self.say(f"{host_name} stands by again")

    def _checked(self, names: Sequence[str]) -> bool:
        """Whether a preflight lets them begin; a host that it refuses is left out if a spare can take its place. Raises
        ConfigError."""
        for finding in self.fleet.check_hosts(names, self.stopped):
            finding_text, has_launched = f"{finding.host}: {finding.text}", self.journal.state.launched
            is_refused = finding.severity == "refuse" and finding.host in names
            if is_refused and self._can_go_on_without(finding.host):
                self.say(f"{finding_text}: it is left out")
                self.strike_host(finding.host, True, finding.text)
                return False
            # On hosts that have trained before, it may be what the next attempt survives.
            if finding.severity == "refuse" and not has_launched:
                raise ConfigError(f"{finding_text} (megastable preflight has all of it)")
            self._warn_once(finding_text)
        return True

    def _warn_once(self, text: str) -> None:
        if text not in self.told:
            self.told.add(text)
            self.say(f"WARNING: {text}")

    def _can_go_on_without(self, host: str) -> bool:
        """Whether those that are there can: as many as wanted, or fewer once the run has begun."""
        run_state = self.journal.state
        shrink_after = self.config.supervise.shrink_after if run_state.launched else None
        return bool(self._without(host, self.fleet.list_missing_hosts(run_state.attempt), shrink_after))

    def _tell(self, missing: Mapping[str, str], waited: float, told: dict[str, str]) -> None:
        """Say who is waited for. told: what was said; is changed. Raises ConfigError for a host that will not come."""
        if waited <= SHOWN:
            return
        if missing and missing.keys() != told.keys():
            told.clear()
            told.update(missing)
            text = "waiting for " + "; ".join(f"{name} ({reason})" for name, reason in missing.items())
            event = HostsAwaited(attempt=self.journal.state.attempt, hosts=list(missing), reason=text)
            self.journal.journal_event(event, say=text)
        hopeless = [(name, reason) for name, reason in missing.items() if HOPELESS.search(reason)]
        if hopeless and not self._lineup(missing, {}, inf, None) and not self.journal.state.launched:
            name, reason = hopeless[0]
            raise ConfigError(f"host {name}: {reason} (as by: ssh {name} true)")

    def _announce(self, chosen: Sequence[str], waited: bool) -> None:
        last_hosts = self.journal.state.hosts or tuple(self.fleet.names[: self.wanted])
        new_names = ", ".join(host_name for host_name in chosen if host_name not in last_hosts)
        replaced_names = ", ".join(host_name for host_name in last_hosts if host_name not in chosen)
        lineup_text = f"all {self.wanted} hosts are there" if waited else ""
        if len(chosen) < self.wanted:
            lineup_text = f"going on with {len(chosen)} of {self.wanted} hosts: {', '.join(chosen)}"
        elif new_names:
            lineup_text = f"{new_names} is back"
            if replaced_names:
                lineup_text = f"{new_names} takes the place of {replaced_names}"
        if waited:
            event = HostsAwaited(attempt=self.journal.state.attempt, hosts=[], reason=lineup_text)
            self.journal.journal_event(event, say=lineup_text)
        elif lineup_text:
            self.say(lineup_text)


SETTLE = 10.0  # seconds for a host to answer before a spare takes its place: agents do not all come at once


def choose_lineup(
    hosts: Sequence[str],
    wanted: int,
    there: Collection[str],
    barred: Mapping[str, bool],
    last: Sequence[str],
    waited: float,
    shrink_after: float | None,
    fits: Callable[[Sequence[str]], bool],
) -> tuple[str, ...]:
    """The hosts of the next attempt, that of rank 0 first; empty: wait on.

    hosts: all, spares at the end; wanted: how many train when all is well; there: those that can begin now. barred:
    hosts that failed, to be used only where nobody else is there (False) or not at all (True). last: of the attempt
    before. waited: seconds since it ended. shrink_after: seconds after which fewer hosts will do, None: never. fits:
    whether the layout and the global batch can be shared out among so many.
    """
    usable_hosts = [host for host in hosts if not barred.get(host, False)]
    # Before all others the hosts of before: a newcomer has to read everything.
    preferred_order = sorted(
        usable_hosts, key=lambda host: (host in barred, host not in (last or hosts[:wanted]))
    )
    best_hosts = preferred_order[:wanted]
    usable_here = [host for host in preferred_order if host in there]
    if len(best_hosts) == wanted:
        if all(best_host in there for best_host in best_hosts):
            return _arranged(best_hosts, last, hosts)
        if len(usable_here) >= wanted and waited >= SETTLE:
            return _arranged(usable_here[:wanted], last, hosts)
    if shrink_after is None or waited < (
        shrink_after if len(usable_hosts) >= wanted else min(shrink_after, SETTLE)
    ):
        return ()
    for host_count in range(min(len(usable_here), wanted), 0, -1):
        if fits(fewer_hosts := _arranged(usable_here[:host_count], last, hosts)):
            return fewer_hosts
    return ()


def _arranged(chosen: Sequence[str], last: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    """Those of before in their places, newcomers in the holes; in another number: all in the order of the host file."""
    if len(chosen) != len(last):
        return tuple(sorted(chosen, key=hosts.index))
    new_hosts = iter(sorted(set(chosen) - set(last), key=hosts.index))
    return tuple(host if host in chosen else next(new_hosts) for host in last)
