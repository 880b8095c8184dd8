"""Watches the first steps of a run for warning signs and reports them. Collective.

All methods are collective: every rank gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from megastable.base.collectives import first
from megastable.checkpoint.store import RunState
from megastable.config.tree import RunConfig
from megastable.data.source import Source
from megastable.data.statistics import sample_entropy
from megastable.engine.layer_stats import LayerStatistics
from megastable.engine.watch import Watch
from megastable.optim.schedule import rates
from megastable.run.events.training_events import Warned
from megastable.run.log import RunLog
from megastable.warnings.signs import RECENT, Sign, Signs, SignsState, due

START = 20_000  # updates: reaching the sum of rates later says nothing about the start


class StartSigns(Watch):
    """Of one training process. state: as in the checkpoint."""

    name = "signs"

    def __init__(
        self,
        config: RunConfig,
        source: Source,
        state: SignsState,
        log: RunLog,
    ) -> None:
        c = config
        self.config, self.source, self.log = config, source, log
        self.settings = c.stability.signs
        self.enabled = c.stability.enabled and self.settings.enabled
        self.signs = Signs(self.settings, c.model.hidden, state)
        self._due, self._rates = due(islice(rates(c), START), self.settings) if self.enabled else (0, 0.0)
        self._entropy: float | None = None
        self._refused = -START  # last step with a refused update

    def state_dict(self) -> dict[str, Any]:
        return self.signs.state.model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.signs = Signs(self.settings, self.config.model.hidden, SignsState.model_validate(state))

    def looks(self, step: int) -> bool:
        """Whether to call `probe.watch` before this step."""
        return self.enabled and self.signs.looks(step)

    def measures(self, step: int) -> bool:
        """Whether to call `engine.statistics` after this step."""
        return self.enabled and self.signs.measures(step)

    def after(self, state: RunState, statistics: LayerStatistics | None, incident: bool = False) -> None:
        """Judge the step that ended at `state`; call after every step. incident: one is open."""
        if not self.enabled:
            return
        if state.discards_in_a_row:
            self._refused = state.step
        lately = state.step < self._refused + self.config.stability.policy.discards
        found, undisturbed = list[Sign](), not incident and not lately
        if statistics is not None:
            found += self.signs.measured(state.step, statistics.overall, statistics.layers, undisturbed)
        if undisturbed and 0 < self._due <= state.updates < self._due + RECENT and not self.signs.compared:
            found += self.signs.unigram(state.recent_losses, self._unigram_entropy(), self._rates)
        for sign in found:
            self.log.emit(
                Warned(step=state.step, text=sign.text, sign=sign.name, numbers=sign.numbers),
                say=f"step {state.step}: WARNING: {sign.text}",
            )

    def _unigram_entropy(self) -> float:
        """Unigram entropy of the run's first samples, a mix as blended; nats."""
        if self._entropy is None:
            size = self.config.model.vocab_size
            assert size is not None, "the vocabulary size is taken from the corpus first"
            self._entropy = first(lambda: sample_entropy(self.source, self.settings.sample, size))
        return self._entropy
