"""Carries out what people change while the run trains (run/changes.py)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from megastable.base.collectives import first
from megastable.base.errors import DataError, SpaceError
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.recovery.run_parts import StepResult
from megastable.run.changes import answer, config_at, follow_recipe, holding, list_left_out, read_requests
from megastable.run.directory import RunDirectory
from megastable.run.events.people_events import ChangeMade, ChangeRefused
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.training.heartbeat import WatchedFile
from megastable_guard.robust import median

LATELY = 20  # applied steps whose median tells the level


class Level:
    """Of the last applied steps."""

    def __init__(self) -> None:
        self._lately = deque[tuple[int, float, float]](maxlen=LATELY)  # step, loss, gradient norm

    def stepped(self, done: StepResult) -> None:
        step, measured = done.state.step, done.measured
        while self._lately and self._lately[-1][0] >= step:  # undone
            self._lately.pop()
        if done.applied and math.isfinite(measured.loss) and math.isfinite(measured.grad_norm):
            self._lately.append((step, measured.loss, measured.grad_norm))

    def since(self, step: int = 0) -> tuple[float, float] | None:
        """Medians of loss and gradient norm, from a step on; None if there were none, as right after a start."""
        told = [numbers for at, *numbers in self._lately if at >= step]
        if not told:
            return None
        losses, norms = zip(*told, strict=True)
        return median(losses), median(norms)


class LiveChanges:
    """Of one rank. made: all changes of the run, in the order in which they were made, the same on every rank."""

    def __init__(
        self, recipe: RunConfig, run: RunDirectory, engine: Engine, log: RunLog, file: WatchedFile
    ) -> None:
        """Collective."""
        self.recipe, self.run, self.engine, self.log, self.file = recipe, run, engine, log, file
        told = first(lambda: list(run.events(ChangeMade, ChangeRefused)))
        self.made = [event for event in told if isinstance(event, ChangeMade)]
        self._answered = {str(event.get("change")) for event in told}
        self._held = list[ChangeMade]()  # what the engine trains with
        self.level = Level()
        self._told_problems = set[str]()

    def follow_recipe(self, changed: Sequence[str], step: int) -> None:
        """The run goes on after `step` with a recipe that differs from that of its last start: "key: old -> new" each.
        Collective. Raises SpaceError."""
        keys = [text.partition(":")[0] for text in changed]

        def follow() -> list[ChangeMade]:
            event = follow_recipe(self.recipe, keys, self.made, step)
            if event is not None:
                self.log.commit(event, say=True)
            return [] if event is None else [event]

        self.made += first(follow)

    def heard(self, ballot: Sequence[float], step: int) -> None:
        """Rank 0 has told all whether there are new requests, by the gate's sum."""
        if any(ballot):
            self.read(step)

    def read(self, step: int) -> None:
        """Answer the requests that there are after `step`. Collective."""
        self.made += first(lambda: self._answer(step))

    def begin(self, step: int) -> set[str]:
        """Let the engine train with what holds at the step after `step`; the keys of changes that begin there or have
        ended."""
        held, before = holding(self.made, step + 1), holding(self.made, step)
        if held != self._held:
            self.engine.follow(config_at(self.recipe, self.made, step + 1))
            self._held = held
            self._warn(step, list_left_out(self.recipe, held, step + 1))
        if held != before and (ended := [change for change in before if change not in held]):
            keys = ", ".join(dict.fromkeys(key for change in ended for key in change.new))
            self.log.say(f"step {step + 1}: {keys} as before the change, which ended")
        return {
            key for change in (*held, *before) if (change in held) != (change in before) for key in change.new
        }

    def _answer(self, step: int) -> list[ChangeMade]:
        """Journal the answers to new requests; the changes that were made."""
        self.file.begin_to_read()
        made = list[ChangeMade]()
        try:
            requests, problems = read_requests(self.file.path)
        except DataError as error:  # what cannot be read now ends no run
            requests, problems = [], [str(error)]
        self._warn(step, problems)
        for request in requests:
            if request.id not in self._answered:
                event = answer(request, self.recipe, [*self.made, *made], step, self.level.since())
                try:
                    self.log.commit(event, say=True)
                except SpaceError:
                    # A restart would train these steps without the change. Tried again after the next step.
                    self.run.waiting.pop()
                    self.file.has_news = True
                    text = f"{self.run.journal} cannot be written to: changes that people ask for wait until it can"
                    self._warn(step, [text])
                    break
                self._answered.add(request.id)
                made += [event] if isinstance(event, ChangeMade) else []
        return made

    def _warn(self, step: int, problems: Sequence[str]) -> None:
        for problem in problems:
            if problem not in self._told_problems:
                self._told_problems.add(problem)
                self.log.emit(Warned(step=step, text=problem), say=f"WARNING: {problem}")
