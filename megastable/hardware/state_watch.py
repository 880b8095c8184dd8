"""Verifies that masters, moments and weights of this rank are what its last update left: between two updates nothing
may change them. Collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megastable.base.collectives import gathered
from megastable.base.fingerprint import Marks, mark_of, marks_of, unlike
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.hardware_fault import FaultLog, HardwareFault
from megastable.run.events.stability_events import StateChanged

KINDS = {"weight": "fp32 masters", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
NAMED = 3  # ranks named in a sentence


class StateWatch(Watch):
    """Of this rank. A GPU reads what an update left beside the next forward pass, on a stream of its own, and once more
    behind the backward pass. on: whether it looks from the next `seal` on."""

    name = "state"

    def __init__(self, on: bool, engine: Engine, step: int, faults: FaultLog) -> None:
        self.engine, self.on, self._faults = engine, on, faults
        self._beside = torch.cuda.Stream() if on and engine.device.type == "cuda" else None
        self.seal(step)

    def seal(self, step: int) -> None:
        """The state after `step` steps is as it should be."""
        self._step = step
        self._marks: Marks | None = None
        self._weights: Marks = {}
        self.weights: Marks | None = None  # as they are before an update, None if they are not looked at
        if not self.on:
            return
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._marks, self._weights = marks_of(self.engine.optimizer_state()), self._mark_weights()
        if self._beside is not None:
            self.engine.hold_updates(self._beside.record_event())

    def _mark_weights(self) -> Marks:
        return {f"weights/{i}": mark_of(flat) for i, flat in enumerate(self.engine.zero.flat_weights)}

    def current(self) -> Marks | None:
        """Of masters and moments, as the last update left them, by the names of optimizer_state()."""
        if self._beside is not None:  # what the GPU does next on its usual stream comes after the seal
            torch.cuda.current_stream().wait_stream(self._beside)
        return self._marks

    def ballot(self, step: int) -> Sequence[float]:
        """Whether the state is not what was sealed."""
        return (float(bool(self._find_changed())),) if self.on else ()

    def judge(self, measured: Measured) -> HardwareFault | None:
        """Collective if anything changed."""
        return self._name_changed() if any(measured.ballot.get(self.name, ())) else None

    def check(self) -> HardwareFault | None:
        """Compare now. Collective."""
        return self._name_changed() if self.on and any(gathered(bool(self._find_changed()))) else None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self.seal(step)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:  # else the state is what the last update left
            self.seal(step)

    def _find_changed(self) -> list[str]:
        """What is not as it was, by names of optimizer_state(), or "weights/..."."""
        sealed = self.current()
        assert sealed is not None
        self.weights = self._mark_weights()
        now = {**marks_of(self.engine.optimizer_state()), **self.weights}
        return unlike({**sealed, **self._weights}, now)

    def _name_changed(self) -> HardwareFault | None:
        everyone = gathered(self._find_changed())
        ranks = [rank for rank, changed in enumerate(everyone) if changed]
        if not ranks:
            return None  # the fingerprint was wrong, not the memory
        texts = [f"{_describe(everyone[r])} of {self._faults.name_ranks([r])}" for r in ranks[:NAMED]]
        more = f" and of {len(ranks) - NAMED} more ranks" if len(ranks) > NAMED else ""
        reason = f"after step {self._step}, between two updates, memory changed: {'; '.join(texts)}{more}"
        fault = self._faults.make_fault(self._step, ranks, reason)
        return self._faults.report(StateChanged, self._step, fault)


def _describe(changed: Sequence[str]) -> str:
    """As a phrase."""
    named = ("weights in compute precision" if name.startswith("weights/") else name for name in changed)
    return ", ".join(dict.fromkeys(KINDS.get(name.split("/")[-1], name) for name in named))
