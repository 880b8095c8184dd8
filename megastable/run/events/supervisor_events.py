"""Events of the supervisor: attempts, their ends, restarts."""

from __future__ import annotations

from megastable.base.text import show_number
from megastable.run.events.event import NOTHING, Event, Flag, Items, Ranges, Real, Text, Tree, Whole


class SupervisorEvent(Event):
    """what: started, took over or ended. code, reason: of its end. seconds: since this process was started. Other
    fields: how it was started."""

    NAME = "supervisor"
    what: Text
    pid: Whole
    host: Text
    recipe: Text = None
    overrides: Items = ()
    given: Items = ()
    module: Text = None
    seconds: Real = None
    code: Whole = None
    reason: Text = None

    def describe_event(self) -> str:
        code_text = "" if self.get("code") is None else f" with {self['code']}"
        return f"supervisor {self.get('what')}{code_text}{self.format_reason()}"


class Launched(Event):
    """log: relative to the run directory. hosts: it runs on, that of rank 0 first; wanted: how many are to train when
    all is well. ahead: seconds by which the clock of rank 0's host is ahead of the supervisor's, as measured."""

    NAME = "launched"
    attempt: Whole
    command: Items
    log: Text
    hosts: Items = ()
    wanted: Whole = None
    ahead: Real = None

    def describe_event(self) -> str:
        host_text = f" on {', '.join(map(str, self.hosts))}" if len(self.hosts) > 1 else ""
        return f"attempt {self.get('attempt')} started{host_text}"


class Ended(Event):
    """An attempt ended. clock: the farthest step done; silent: seconds since its last progress; skipped: positions
    skipped because of it. Other fields: `End` of supervise/exit_cause.py; what: "" if it is no failure."""

    NAME = "ended"
    attempt: Whole
    clock: Whole = None
    silent: Real = None
    skipped: Ranges = ()
    code: Whole = None
    signal: Whole = None
    hung: Flag = None
    what: Text = None
    step: Whole = None
    cursor: Whole = None
    rank: Whole = None
    host: Text = None
    failure: Text = None
    certain: Flag = None
    trained: Flag = None
    gone: Items = ()

    def describe_event(self) -> str:
        how, exit_code, signal = self.get("failure"), self.get("code"), self.get("signal")
        if exit_code == 0 and not how:
            return f"attempt {self.get('attempt')} finished"
        return f"attempt {self.get('attempt')} ended: {how or (f'signal {signal}' if signal else f'code {exit_code}')}"


class Hang(Event):
    """waited, limit: seconds without progress, and the limit. silent: what is known of the hanging processes; stacks:
    files with theirs, relative to the run directory."""

    NAME = "hang"
    attempt: Whole
    phase: Text
    waited: Real
    limit: Real
    step: Whole
    silent: Items
    stacks: Items

    def describe_event(self) -> str:
        limit_text = f", {show_number(self['limit'], '.0f')} s is the limit" if "limit" in self else ""
        waited = show_number(self.get("waited"), ".0f")
        return f"no progress for {waited} s in {self.get('phase')}{limit_text}"


class HostsAwaited(Event):
    """The attempt after this one waits for hosts. hosts: their names, none once all are there; reason: which, and why
    each is not there."""

    NAME = "hosts_awaited"
    TOLD = "{reason}"
    attempt: Whole
    hosts: Items
    reason: Text


class HostLeftOut(Event):
    """A host failed. until: time.time() until which others are preferred to it, or with `wholly` it is not used at all;
    strikes: how often it failed in this run; burn_in: seconds of the one that it must pass before it is used again."""

    NAME = "host_left_out"
    host: Text
    until: Real
    wholly: Flag
    strikes: Whole
    burn_in: Real = None
    reason: Text

    def describe_event(self) -> str:
        how_text = "left out" if self.get("wholly") else "the last choice"
        seconds_text = None if self.until is None or self.time is None else self.until - self.time
        until_text = f"for {show_number(seconds_text, '.0f')} s"
        if self.get("burn_in"):
            until_text += " and until a burn-in finds nothing"
        return f"{self.get('host')} is {how_text} {until_text}{self.format_reason()}"


class HostProven(Event):
    """A burn-in of `seconds` found nothing wrong with a host that had computed wrong: it may be used again."""

    NAME = "host_proven"
    host: Text
    seconds: Real

    def describe_event(self) -> str:
        seconds_text = show_number(self.get("seconds"), ".0f")
        return f"{self.get('host')} may be used again: a burn-in of {seconds_text} s found nothing"


class HostSlow(Event):
    """what: begun, or over: as fast as the others again. rank: its slowest; ratio: of the time that its own work takes
    to that of other ranks; seconds: longer per step; cost: the share of a step that this is; parts: the ratio of every
    activity; reason: all this in a sentence."""

    NAME = "host_slow"
    what: Text
    attempt: Whole
    host: Text
    rank: Whole = None
    ratio: Real = None
    seconds: Real = None
    cost: Real = None
    parts: Tree = NOTHING
    reason: Text

    def describe_event(self) -> str:
        return str(self.get("reason") or f"host {self.get('host')} is slow")


class Restart(Event):
    """delay: seconds until then."""

    NAME = "restart"
    attempt: Whole
    reason: Text
    delay: Real

    def describe_event(self) -> str:
        return f"to be started again in {show_number(self.get('delay'), '.0f')} s{self.format_reason()}"


class HookFailed(Event):
    """kind: of the notification."""

    NAME = "hook_failed"
    TOLD = "{kind} failed{because_problem}"
    kind: Text
    problem: Text
