"""Events of what people do to a run: notes, and settings that they change while it trains."""

from __future__ import annotations

from megastable.base.text import show_number
from megastable.run.events.event import NOTHING, Event, Real, Text, Tree, Whole


class Note(Event):
    """step: that the run had done, or that the note is about; none of a start. who: a login name."""

    NAME = "note"
    step: Whole = None
    who: Text
    text: Text

    def describe_event(self) -> str:
        return f"note{_by(self)}: {self.get('text')}"


class ChangeMade(Event):
    """Settings have other values from `step` on, up to step `until`, if it is given (run/changes.py). change: of the
    request; asked: its time. old, new: values by key, of the recipe. loss, grad_norm: medians of the last applied steps
    before."""

    NAME = "change_made"
    step: Whole
    until: Whole = None
    change: Text
    who: Text
    asked: Real = None
    reason: Text
    old: Tree = NOTHING
    new: Tree = NOTHING
    loss: Real = None
    grad_norm: Real = None

    def describe_event(self) -> str:
        changes = ", ".join(f"{key} {self.old.get(key)} -> {value}" for key, value in self.new.items())
        until = "" if self.until is None else f", up to step {self.until}"
        return f"{changes or 'settings changed'} from this step on{until}{_by(self)}{self.format_reason()}"


class ChangeRefused(Event):
    """step: after which the request was read. problem: why the run does not follow it."""

    NAME = "change_refused"
    step: Whole
    change: Text
    who: Text
    reason: Text
    problem: Text

    def describe_event(self) -> str:
        return f"a change{_by(self)} is refused{self.format_reason('problem')}"


class ChangeMeasured(Event):
    """What a run did after a change: `steps` after it began, or at its end or that of the run. Medians of the
    last applied steps before the change and before `step`: losses in nats per token, gradient norms before clipping."""

    NAME = "change_measured"
    step: Whole
    change: Text
    steps: Whole
    new: Tree = NOTHING
    loss_before: Real = None
    loss_after: Real = None
    norm_before: Real = None
    norm_after: Real = None

    def describe_event(self) -> str:
        change_text = ", ".join(f"{key}={new_value}" for key, new_value in self.new.items()) or "a change"
        loss = f"loss {_known(self.get('loss_before'))} before, {_known(self.get('loss_after'))} now"
        norm = f"gradient norm {_known(self.get('norm_before'))} before, {_known(self.get('norm_after'))} now"
        return f"after {self.get('steps')} steps with {change_text}: {loss}; {norm}"


def _by(event: Event) -> str:
    return f" by {event['who']}" if event.get("who") else ""


def _known(value: object) -> str:
    return "not known" if value is None else show_number(value, ".4g")
