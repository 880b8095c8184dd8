"""What a supervisor knows of a run from its journal, so that it may die at any moment. Pure."""

from __future__ import annotations

from collections import Counter

from pydantic import ValidationError

from megastable.run.run_history import FailedAttempt, RunHistory
from megastable.supervise.bars import HostBar
from megastable.supervise.exit_cause import End
from megastable.supervise.restart_policy import Failure
from megastable_guard.incident import Breakdown, Incident


class SupervisorState(RunHistory):
    """The run's history, and what a supervisor concludes from it. Malformed events are ignored: repairing the journal
    is not this process's job."""

    @property
    def began_step(self) -> int:
        """The step that the current processes resumed from."""
        return self.starts[-1].step if self.starts else 0

    @property
    def predecessor(self) -> tuple[int, str] | None:
        """(process, host) of a supervisor that ended without a word."""
        last = self.supervisor
        if last is None or last.what == "ended" or last.pid is None or last.host is None:
            return None
        return last.pid, last.host

    @property
    def number(self) -> int:
        """Of the newest incident; 0 if there is none."""
        return max(self.incidents, default=0)

    @property
    def open(self) -> dict[int, Incident]:
        """Our incidents that are not resolved."""
        found = dict[int, Incident]()
        for number, told in sorted(self.incidents.items()):
            if told.summary.get("outcome") == "open" and told.summary.get("verdict") in list(Breakdown):
                try:
                    found[number] = Incident.model_validate(told.summary)
                except ValidationError:
                    continue
        return found

    @property
    def bars(self) -> dict[str, HostBar]:
        """Of hosts that failed since a person started the run."""
        return {
            host: HostBar(e.until, e.wholly, e.strikes, 0.0 if host in self.proven else e.burn_in or 0.0)
            for host, e in self.left_out.items()
            if e.until is not None and e.wholly is not None and e.strikes is not None
        }

    @property
    def failures(self) -> list[Failure]:
        """Since a person started the run."""
        found = list[Failure]()
        for failed in self.failed_attempts:
            if (end := _read_end(failed)) is not None:
                host = None if _lacks_hosts(end, failed.hosts, failed.widest) else end.host
                skipped = bool(failed.event.skipped)
                found.append(Failure(end.what, end.step, host, failed.clock, skipped, end.code))
        return found

    @property
    def unfit(self) -> Counter[int]:
        """By number of hosts, failures of attempts on fewer than before that did not train a step."""
        ends = ((failed, _read_end(failed)) for failed in self.failed_attempts)
        return Counter(
            failed.hosts
            for failed, end in ends
            if end is not None and _lacks_hosts(end, failed.hosts, failed.widest)
        )

    @property
    def unmended(self) -> End | None:
        """An end that is not acted on yet."""
        return None if self.unanswered is None else _read_end(self.unanswered)

    def does_not_fit(self, end: End) -> bool:
        """Whether the newest attempt did not fit on its hosts."""
        return _lacks_hosts(end, len(self.hosts), self.widest)


def _read_end(failed: FailedAttempt) -> End | None:
    known = failed.event.fields
    try:
        return End.model_validate({key: known[key] for key in End.model_fields if key in known})
    except ValidationError:
        return None


def _lacks_hosts(end: End, hosts: int, widest: int) -> bool:
    """Whether an attempt on fewer hosts than before ended by an error before its first step, as where a larger share
    of the optimizer's state does not fit into memory: that is no host's fault."""
    died = bool(end.code or end.signal) and not end.gone
    return died and not end.trained and hosts < widest
