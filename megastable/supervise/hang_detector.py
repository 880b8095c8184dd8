"""How long to wait for a run that shows no progress, learnt from how long it usually takes. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

from megastable.config.supervise import SuperviseConfig
from megastable.run.rank_ipc import Progress

RECENT = 64  # steps whose median is the usual time
TICK = 1.0  # seconds that count at most between two looks: more, and it is this process that was stopped


def patience(phase: str, usual: float | None, config: SuperviseConfig) -> float:
    """Seconds without a sign of progress that mean nothing yet, in a phase of the run. usual: of a step, if known."""
    if phase != "step" or usual is None:
        return config.hang_unknown
    return max(config.hang_floor, config.hang_factor * usual)


class HangDetector:
    """Told of every look at a run, says when it hangs. Seconds are added up look by look: no clock can jump."""

    def __init__(self, config: SuperviseConfig) -> None:
        self.config = config
        self.phase = "starting"  # what is being waited for
        self.waited = 0.0  # since something moved
        self._lasted = 0.0  # the present phase
        self._whole = False  # whether its beginning was seen
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._longest: dict[str, float] = {}
        self._seen: Progress | None = None

    def began(self) -> None:
        """A new attempt: what is known stays."""
        self.phase, self.waited, self._lasted, self._whole, self._seen = "starting", 0.0, 0.0, True, None

    def look(self, progress: Progress | None, seconds: float) -> bool:
        """Whether it hangs. progress: of the present attempt, None before its first; seconds: since the last look."""
        passed = min(seconds, TICK)
        self.waited, self._lasted = self.waited + passed, self._lasted + passed
        if progress is not None and self._moved(progress):
            if progress.phase != self.phase:
                if self._whole and self.phase != "step":
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
        """Seconds that the present phase may take."""
        least = patience(self.phase, median(self._steps) if self._steps else None, self.config)
        # How long what is no step takes depends on more than the run: a disk, a cache, how much there is to look for.
        return max(least, self.config.hang_factor * self._longest.get(self.phase, 0.0))
