"""Turns the events of a run's journal into notes for its trackers, each once, also over several processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megastable.run.events import (
    data_events,
    people_events,
    stability_events,
    supervisor_events,
    training_events,
)
from megastable.run.events.event import Event, tree
from megastable.run.events.follow import Follower
from megastable.run.events.stability_events import IncidentEvent
from megastable.run.events.training_events import (
    ConfigChanged,
    Finished,
    Stopped,
    TasksEvaluated,
    Training,
)
from megastable.training.trackers.curves import TASKS
from megastable.training.trackers.hyperparameters import is_untold
from megastable.training.trackers.points import NotePoint, TasksPoint

# Not every refused update, checkpoint or evaluation: what a person would write on the curve.
NOTED: tuple[type[Event], ...] = (
    IncidentEvent, stability_events.AlertEvent, stability_events.TrendEvent, stability_events.Handover,
    stability_events.RateCut, stability_events.RateLifted, stability_events.FellBack, stability_events.Returned,
    stability_events.KernelsLeft, stability_events.KernelsTriedAgain,
    stability_events.ReplicasDiffer, stability_events.StateChanged, stability_events.ReplayDiffers,
    stability_events.HostFaulty, training_events.Warned, training_events.Unstable, ConfigChanged,
    training_events.Resumed, training_events.CheckpointFailed, training_events.CheckpointRejected,
    training_events.TasksFailed, Stopped, Finished,
    people_events.Note, people_events.ChangeMade, people_events.ChangeMeasured,
    supervisor_events.Hang, supervisor_events.HostLeftOut, supervisor_events.HostSlow, supervisor_events.Restart,
    data_events.BlendChanged,
)  # fmt: skip
LONGEST = 200  # lines of an incident's story


class TrackerNotes:
    """told: how many events earlier processes have told. incidents: how many there were; status: how the training
    ended, as far as the journal says."""

    def __init__(self, journal: Path, told: int = 0) -> None:
        self._follower = Follower(journal)
        self._told, self.read = told, 0
        self._starts = self._follower.starts
        self._stories: dict[int, list[str]] = {}
        self.incidents = 0
        self.status = "failed"

    def new(self) -> Iterator[NotePoint | TasksPoint]:
        """Notes of the events since the last call, and the scores of tasks among them."""
        again = False
        for event in self._follower.stream():
            if self._follower.starts != self._starts:  # the file was repaired: its events were told already
                self._starts, self._told, self.read, again = self._follower.starts, 0, 0, True
                self._stories.clear()
            self.read += 1
            note, known = self._note(event), again or self.read <= self._told
            if isinstance(event, Training):
                self.status = "failed"  # until it says otherwise
            # A run that is complete stays so, whoever opens its trackers; one that was stopped is about to go on.
            if isinstance(event, Finished) or (isinstance(event, Stopped) and not known):
                self.status = event.NAME
            if known:
                continue
            if note is not None:
                yield note

    def _note(self, event: Event) -> NotePoint | TasksPoint | None:
        if isinstance(event, TasksEvaluated):
            scores = {TASKS + name: value for name, value in event.numbers.items()}
            return TasksPoint(event.of_step or 0, event.tokens or 0, event.time or 0.0, scores)
        if isinstance(event, ConfigChanged):
            event = ConfigChanged.of({**event.fields, "changes": _told(event)})
            if not event.changes:
                return None
        if not isinstance(event, NOTED) or not (text := event.sentence()):
            return None
        if not isinstance(event, IncidentEvent) or (number := event.number) is None:
            return NotePoint(
                _step(event), event.time or 0.0, event.event, text, what=str(event.get("what") or "")
            )
        step, what = _step(event), str(event.get("what") or "")
        self.incidents = max(self.incidents, number)
        lines = self._stories.setdefault(number, [])
        if len(lines) < LONGEST:
            lines.append(f"- step {step}: {text.removeprefix(f'incident {number}: ')}")
        story = f"**Incident {number}**\n\n" + "\n".join(lines) + "\n"
        return NotePoint(step, event.time or 0.0, event.event, text, number, what, event.summary, story)


def _told(event: ConfigChanged) -> list[str]:
    """Its changes, "key: old -> new" each, without those of keys that trackers are not told."""
    return [text for text in map(str, event.changes) if not is_untold(text.partition(":")[0])]


def _step(event: Event) -> int:
    """When it happened; 0 if the event does not say."""
    for fields, key in ((event, "step"), (event, "steps"), (tree(event.get("summary")), "step")):
        if isinstance(step := fields.get(key), int):
            return step
    return 0
