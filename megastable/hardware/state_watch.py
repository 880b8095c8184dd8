"""Verifies that masters, moments and weights of this rank are what its last update left: between two updates nothing
may change them. Collective."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megastable.base.collectives import gathered
from megastable.base.fingerprint import Marks, mark_of, marks_of, unlike
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.hardware.hardware_fault import HardwareFault
from megastable.run.events.stability_events import StateChanged
from megastable.run.log import RunLog

KINDS = {"weight": "fp32 masters", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
TOLD = 3  # things named in a sentence


class StateWatch(Watch):
    """Of this rank. A GPU reads what an update left beside the next forward pass, on a stream of its own, and once more
    behind the backward pass. on: whether it looks from the next `seal` on."""

    name = "state"

    def __init__(self, on: bool, engine: Engine, step: int, log: RunLog) -> None:
        self.engine, self.log, self.on = engine, log, on
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
            self._marks, self._weights = marks_of(self.engine.optimizer_state()), self._weighed()
        if self._beside is not None:
            self.engine.hold_updates(self._beside.record_event())

    def _weighed(self) -> Marks:
        return {f"weights/{i}": mark_of(flat) for i, flat in enumerate(self.engine.zero.flat_weights)}

    def current(self) -> Marks | None:
        """Of masters and moments, as the last update left them, by the names of optimizer_state()."""
        self._wait_for_seal()
        return self._marks

    def _wait_for_seal(self) -> None:
        """What the GPU does next on its usual stream comes after the seal."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def ballot(self, step: int) -> Sequence[float]:
        """Whether the state is not what was sealed."""
        return (float(bool(self._odd())),) if self.on else ()

    def judge(self, measured: Measured) -> HardwareFault | None:
        """Collective if anything changed."""
        return self._named() if any(measured.ballot.get(self.name, ())) else None

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self.seal(step)

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:  # else the state is what the last update left
            self.seal(step)

    def check(self) -> HardwareFault | None:
        """Compare now. Collective."""
        return self._named() if self.on and any(gathered(bool(self._odd()))) else None

    def _odd(self) -> list[str]:
        """What is not as it was, by names of optimizer_state(), or "weights/..."."""
        assert self._marks is not None
        self._wait_for_seal()
        self.weights = self._weighed()
        now = {**marks_of(self.engine.optimizer_state()), **self.weights}
        return unlike({**self._marks, **self._weights}, now)

    def _named(self) -> HardwareFault | None:
        everyone = gathered((socket.gethostname(), self._odd()))
        found = {rank: (host, odd) for rank, (host, odd) in enumerate(everyone) if odd}
        if not found:
            return None  # the fingerprint was wrong, not the memory
        texts = [f"{_what(odd)} of rank {rank} on {host}" for rank, (host, odd) in list(found.items())[:TOLD]]
        more = f" and of {len(found) - TOLD} more ranks" if len(found) > TOLD else ""
        reason = f"after step {self._step}, between two updates, memory changed: {'; '.join(texts)}{more}"
        ranks, hosts = list(found), [host for host, _ in found.values()]
        self.log.emit(StateChanged(step=self._step, ranks=ranks, hosts=hosts, reason=reason), say=True)
        return HardwareFault(self._step, False, ranks, sorted(set(hosts)), reason)


def _what(odd: Sequence[str]) -> str:
    """As a phrase."""
    return ", ".join(dict.fromkeys(KINDS.get(name.split("/")[-1], _other(name)) for name in odd))


def _other(name: str) -> str:
    return "weights in compute precision" if name.startswith("weights/") else name
