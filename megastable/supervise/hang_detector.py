"""Decides when a run hangs, from how long its steps usually take. Pure."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

from megastable.config.supervise import SuperviseConfig
from megastable.run.rank_ipc import Progress

RECENT = 64  # steps whose median is the usual time
LEARNT = (
    3  # times that a phase other than a step was seen from start to end, before `hang_unknown` is lowered ...
)
LEAST = 300.0  # ... to this, in seconds: the work in such a phase varies
TICK = 1.0  # most seconds counted between two polls: more, and this process itself was stopped


def patience(phase: str, usual: float | None, config: SuperviseConfig) -> float:
    """Seconds without progress that are tolerated in a phase. usual: seconds of a step, if known."""
    if phase != "step" or usual is None:
        return config.hang_unknown
    return max(config.hang_floor, config.hang_factor * usual)


class HangDetector:
    """Fed at every poll of a run, says when it hangs. Adds up seconds poll by poll, so a clock jump does no harm."""

    def __init__(self, config: SuperviseConfig) -> None:
        self.config = config
        self.phase = "starting"  # what the run is doing
        self.waited = 0.0  # seconds since the last progress
        self._lasted = 0.0  # seconds in the current phase
        self._whole = False  # whether the start of the phase was seen
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._longest: dict[str, float] = {}
        self._times: Counter[str] = Counter()
        self._seen: Progress | None = None

    def began(self) -> None:
        """A new attempt begins; learnt durations stay."""
        self.phase, self.waited, self._lasted, self._whole, self._seen = "starting", 0.0, 0.0, True, None

    def forgive(self) -> None:
        """What was waited for until now has another reason."""
        self.waited = 0.0

    def look(self, progress: Progress | None, seconds: float) -> bool:
        """Whether it hangs. progress: of the current attempt, None before its first; seconds: since the last poll."""
        passed = min(seconds, TICK)
        self.waited, self._lasted = self.waited + passed, self._lasted + passed
        if progress is not None and self._moved(progress):
            if progress.phase != self.phase:
                if self._whole and self.phase != "step":
                    self._times[self.phase] += 1
                    self._longest[self.phase] = max(self._longest.get(self.phase, 0.0), self._lasted)
                self._lasted, self._whole = 0.0, True
            if progress.phase == "step" and progress.seconds is not None:
                self._steps.append(progress.seconds)
            self._seen, self.phase, self.waited = progress, progress.phase, 0.0
        return self.waited > self.limit

    def _moved(self, new: Progress) -> bool:
        old = self._seen
        return old is None or (old.phase, old.step, old.cursor) != (new.phase, new.step, new.cursor)

    @property
    def limit(self) -> float:
        """Seconds that the current phase may take."""
        least = patience(self.phase, median(self._steps) if self._steps else None, self.config)
        if self.phase != "step" and self._times[self.phase] >= LEARNT:
            least = min(least, LEAST)
        # The duration of other phases also depends on disk, cache and amount of work.
        return max(least, self.config.hang_factor * self._longest.get(self.phase, 0.0))
