"""Judges what routers chose, at every applied update, against each expert's own history: `RoutingHistory` is pure,
`RoutingWatch` tells what it finds.

- `expert_load`: an expert has far more of the choices than ever, and more than the geometric mean of an even share and
  all tokens. Nemotron 3 Ultra had one at 12 times the mean.
- `expert_idle`: no token chooses an expert any more that many chose before.
- `router_entropy`: the scores of a router have collapsed to few experts.
- `router_logits`: the logsumexp of its logits has grown (arXiv:2202.08906, section 3), up or down: the scores of a
  sigmoid gate that all go to zero show here alone.
- `expert_bias`: a bias has moved by more than `bias_rate` allows: something besides the updates changed it.

New is not bad: another language chooses other experts, and a router sharpens as it learns. So a number must be far from
its level, in its own scatter and by a factor, for several updates in a row. Level and scatter follow it slowly, by
steps that no outlier makes large, so that what lasts becomes usual. A sign is a warning. Whether the updates of the run
made it, a replay of the same steps shows: what they do not make again is undone, and for what they do remedies of
routers are tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field

from megastable.base.collectives import find_least, gather_objects
from megastable.base.text import count_noun
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.engine.measured import Measured
from megastable.engine.watch import Watch
from megastable.run.events.stability_events import TrendEvent
from megastable.run.log import RunLog
from megastable.warnings.expert_loads import LayerLoads, read_choices
from megastable_guard.damage import JudgementPause

Numbers = npt.NDArray[np.float64]

KNOWN, MEMORY = 50, 64  # updates before anything is judged, and those that level and scatter are averages of
OUTLIER = 3.0  # scatters by which a number moves its level at most
FAR = 8.0  # scatters between a number and its level, at least
GROWN, FALLEN = 2.0, 0.75  # load or logsumexp over the level; entropy over it
LEAST_Z = 1.0  # growth of the logsumexp: near zero, twice as much is nothing
IDLE, USED = 0.02, 0.25  # loads of an expert that is idle, and of one that was not
EXPECTED = 64  # choices that an idle expert should have had, at least: small batches leave some out by chance
BIAS_EVERY = 8  # steps between two looks at the biases, which wait for a GPU
SLACK = 1.01  # of the distance that a bias may move: rounding
LASTING = {"expert_load": 8, "expert_idle": 16, "router_entropy": 8, "router_logits": 8}
"""By signal, how many judged updates in a row a number must be beyond its limit; `OVER` times as many within it end the
warning."""
OVER = 4
LONGER = 2  # times as long as a place has been beyond its limit before, it must be for a warning
BIAS = "expert_bias"  # the signal that one look is enough for
TRIED = (
    "reset_bias", "past_routing", "hold_router", "router_z_loss", "balance_loss", "no_balance_loss", "router_rate",
)  # fmt: skip
"""Remedies that are tried where the updates of the run change a router so. A lower rate of all would win any trial."""
REMEDIES = {
    "expert_load": "a larger model.experts.balance_loss or bias_rate; a lower rate of the routers",
    "expert_idle": "a larger model.experts.balance_loss or bias_rate",
    "router_entropy": "a larger model.experts.router_z_loss; a lower rate of the routers",
    "router_logits": "a larger model.experts.router_z_loss; a lower rate of the routers",
    BIAS: "check the memory of the host, and code that changes the biases",
}


def choose_remedies(layer: str) -> Sequence[str]:
    """What is tried where the tensors of a layer were the first to grow."""
    return TRIED if layer.endswith(".mlp.router") else ()


class _State(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


class Streak(_State):
    """Judged updates in a row, since step `first`, of a place beyond its limit, or within it after a warning. usual:
    the level when it began."""

    first: int
    length: int
    usual: float


@dataclass(frozen=True)
class RoutingSign:
    """`signal` at a place: an expert of a layer, or with None its router. since: the first step beyond the limit.
    usual, value: the level before, and the number now. severity: 1 at the limit."""

    signal: str
    layer: int
    expert: int | None
    since: int
    step: int
    usual: float
    value: float
    severity: float

    @property
    def before(self) -> int:
        """The last step before it."""
        return self.since - 1

    @property
    def remedies(self) -> list[str]:
        """Those of `TRIED` that may help. For a while a model may well predict better without a balance loss: that
        shows nothing where the balance is what was lost."""
        is_unbalanced = self.signal in ("expert_load", "expert_idle")
        return [remedy for remedy in TRIED if not (is_unbalanced and remedy == "no_balance_loss")]

    @property
    def where(self) -> str:
        part_name = "router" if self.expert is None else f"experts.{self.expert}"
        return f"blocks.{self.layer}.mlp.{part_name}"

    @property
    def reason(self) -> str:
        now_text, usual_text, where = f"{self.value:.3g}", f"{self.usual:.3g}", self.where
        signal_texts = {
            "expert_load": f"{where} has {now_text} times the choices of the mean expert, usual was {usual_text}",
            "expert_idle": f"{where} has {now_text} times the choices of the mean expert, usual was {usual_text}",
            "router_entropy": f"the scores of {where} have an entropy of {now_text} nats, usual was {usual_text}",
            "router_logits": f"the logits of {where} have a logsumexp of {now_text}, usual was {usual_text}",
            BIAS: f"the bias of {where} is {now_text}, and was {usual_text}: updates move it less far",
        }
        return f"{signal_texts[self.signal]} (since step {self.since})"

    def is_repeated(self, routed: Routed) -> bool:
        """Whether a replay of the steps has come at least half of the way again."""
        value_again = routed.find_value(self.signal, self.layer, self.expert)
        half_way = (self.usual + self.value) / 2
        return value_again >= half_way if self.value > self.usual else value_again <= half_way


@dataclass(frozen=True)
class Routed:
    """What routers chose in a step's batch. choices: [layers, columns], see model/experts.py, summed over all ranks.
    bias: [layers, experts], after its update; None: not read."""

    choices: Numbers
    experts: int
    bias: Numbers | None
    layers: list[LayerLoads] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", read_choices(self.choices, self.experts))

    @property
    def table(self) -> Numbers:
        """[layers with experts, experts + 2]: the load of every expert, the entropy, the logsumexp."""
        return np.array([[*layer.loads, layer.entropy, layer.z] for layer in self.layers])

    @property
    def crowded_load(self) -> float:
        """The geometric mean of an even load, 1, and of that of an expert that every token chooses."""
        choice_counts, token_counts = self.choices[:, : self.experts].sum(), self.choices[:, -1].sum()
        return math.sqrt(self.experts * token_counts / choice_counts)

    def find_value(self, signal: str, layer: int, expert: int | None) -> float:
        if signal == BIAS:
            assert self.bias is not None and expert is not None
            return float(self.bias[layer, expert])
        found_layer = next(loads for loads in self.layers if loads.layer == layer)
        if expert is not None:
            return float(found_layer.loads[expert])
        return found_layer.entropy if signal == "router_entropy" else found_layer.z


class RoutingHistory(_State):
    """State for checkpoints and snapshots. updates: judged. levels, scatters: of `Routed.table`. streaks: by signal and
    place. standing: what was warned of and is not over, its text by signal and place. passed: the longest that a place
    was beyond its limit before, in updates, if that is long enough to tell. bias: at its last look, at
    `bias_step`, and how many updates ago; not saved, as a rewind or a restart may change it on purpose."""

    updates: int = 0
    levels: list[list[float]] = []
    scatters: list[list[float]] = []
    streaks: dict[str, Streak] = {}
    standing: dict[str, str] = {}
    passed: dict[str, int] = {}
    bias: list[list[float]] = Field(default=[], exclude=True)
    bias_age: int = Field(default=0, exclude=True)
    bias_step: int = Field(default=0, exclude=True)
    pause: JudgementPause = JudgementPause()

    def judge_update(
        self, step: int, routed: Routed, bias_rate: float, warns: bool = True
    ) -> list[RoutingSign]:
        """What is new at an applied update, the farthest first. warns: False: only learn what is usual."""
        table, new_signs = routed.table, list[RoutingSign]()
        if np.shape(self.levels) != table.shape:
            self.begin_again()
            self.levels, self.scatters = table.tolist(), np.zeros_like(table).tolist()
        levels, scatters = np.array(self.levels), np.array(self.scatters)
        if warns and self.updates >= KNOWN:
            mean_choices = routed.choices[:, : routed.experts].sum(1).max() / routed.experts
            for signal, severities in _rate_table(routed, levels, scatters).items():
                new_signs += self._follow(signal, step, severities, routed, levels, mean_choices)
        new_signs += self._judge_bias(step, routed, bias_rate) if warns else []
        self._learn(table, levels, scatters)
        return sorted(new_signs, key=lambda sign: -sign.severity)

    def _follow(
        self,
        signal: str,
        step: int,
        severities: Numbers,
        routed: Routed,
        levels: Numbers,
        mean_choices: float,
    ) -> list[RoutingSign]:
        """Count updates beyond the limit, or after a warning within it. severities: [layers, places]; limit: 1."""
        found_signs, first_column = list[RoutingSign](), _first_column(signal, routed.experts)
        beyond_places = {(int(row), int(column)) for row, column in np.argwhere(severities >= 1)}
        layer_rows = {loads.layer: row for row, loads in enumerate(routed.layers)}
        known_places = [name.split() for name in (*self.streaks, *self.standing)]
        followed_places = beyond_places | {
            (layer_rows[int(layer)], int(column)) for name, layer, column in known_places if name == signal
        }
        for row, column in sorted(followed_places):
            layer, usual = routed.layers[row].layer, float(levels[row, first_column + column])
            place_name = f"{signal} {layer} {column}"
            if ((row, column) in beyond_places) == (place_name in self.standing):
                ended_streak = self.streaks.pop(place_name, None)
                if ended_streak is not None and place_name not in self.standing:
                    self._pass_streak(place_name, ended_streak.length)
                continue
            own_streak = self.streaks.setdefault(place_name, Streak(first=step, length=0, usual=usual))
            own_streak.length += 1
            if place_name in self.standing:
                if own_streak.length >= OVER * LASTING[signal]:
                    del self.standing[place_name], self.streaks[place_name]
            elif own_streak.length >= max(LASTING[signal], LONGER * self.passed.get(place_name, 0)) and (
                signal != "expert_idle" or own_streak.length * own_streak.usual * mean_choices >= EXPECTED
            ):
                expert = column if signal.startswith("expert") else None
                value_now = routed.find_value(signal, layer, expert)
                sign_severity = float(severities[row, column])
                new_sign = RoutingSign(
                    signal, layer, expert, own_streak.first, step, own_streak.usual, value_now, sign_severity
                )
                self.standing[place_name] = new_sign.reason
                self._pass_streak(place_name, own_streak.length)
                del self.streaks[place_name]
                found_signs.append(new_sign)
        return found_signs

    def _pass_streak(self, place: str, length: int) -> None:
        """A place was beyond its limit for some updates, and came back by itself, or was warned of: what needs as many
        again is no news, as of an expert for a language that comes in bursts."""
        least_telling = LASTING[place.split()[0]] // LONGER
        if length > max(least_telling, self.passed.get(place, 0)):
            self.passed[place] = length

    def _judge_bias(self, step: int, routed: Routed, bias_rate: float) -> list[RoutingSign]:
        """Biases that have moved farther than the updates since the last look may have moved them."""
        self.bias_age += 1
        if routed.bias is None:
            return []
        bias_before, update_count, found_signs = np.array(self.bias), self.bias_age, list[RoutingSign]()
        first_step = self.bias_step + 1  # refused steps are no updates
        self.bias, self.bias_age, self.bias_step = routed.bias.tolist(), 0, step
        for place_name in [place for place in self.standing if place.startswith(BIAS)]:
            del self.standing[place_name]
        if bias_before.shape != routed.bias.shape:
            return []
        bias_severities = np.abs(routed.bias - bias_before) / (SLACK * update_count * bias_rate + 1e-6)
        for layer, expert in np.argwhere(~(bias_severities <= 1)):
            bias_moves = float(bias_before[layer, expert]), float(routed.bias[layer, expert])
            sign_severity = float(bias_severities[layer, expert])
            new_sign = RoutingSign(
                BIAS, int(layer), int(expert), first_step, step, *bias_moves, sign_severity
            )
            self.standing[f"{BIAS} {layer} {expert}"] = new_sign.reason
            found_signs.append(new_sign)
        return found_signs

    def _learn(self, table: Numbers, levels: Numbers, scatters: Numbers) -> None:
        """Move the levels by at most some scatters, and the scatters by as much, towards the newest numbers."""
        self.updates += 1
        newest_share = 1 / min(self.updates, MEMORY)
        level_differences = table - levels
        if self.updates > KNOWN:
            most_moved = OUTLIER * scatters + 1e-6
            level_differences = np.clip(level_differences, -most_moved, most_moved)
        level_differences = np.nan_to_num(level_differences)
        self.scatters = (scatters + newest_share * (np.abs(level_differences) - scatters)).tolist()
        self.levels = (levels + newest_share * level_differences).tolist()

    def begin_again(self) -> None:
        """What comes is of another kind, on purpose: what was usual is forgotten."""
        self.updates, self.levels, self.scatters, self.streaks, self.passed, self.bias = 0, [], [], {}, {}, []


def _first_column(signal: str, experts: int) -> int:
    """Where the places of a signal begin in a row of `Routed.table`."""
    return {"router_entropy": experts, "router_logits": experts + 1}.get(signal, 0)


def _rate_table(routed: Routed, levels: Numbers, scatters: Numbers) -> dict[str, Numbers]:
    """By signal, how far each place is from its limit: [layers, places], 1 at the limit."""
    table, experts, crowded = routed.table, routed.experts, routed.crowded_load
    loads, entropies, logsumexps = (
        table[:, :experts],
        table[:, experts : experts + 1],
        table[:, experts + 1 :],
    )
    usual_loads, usual_entropies, usual_logsumexps = (
        levels[:, :experts], levels[:, experts : experts + 1], levels[:, experts + 1 :]
    )  # fmt: skip
    far = FAR * scatters
    return {
        "expert_load": loads
        / np.maximum(crowded, np.maximum(GROWN * usual_loads, usual_loads + far[:, :experts])),
        "expert_idle": ((loads <= IDLE) & (usual_loads >= USED)).astype(np.float64),
        "router_entropy": np.minimum(
            FALLEN * usual_entropies, usual_entropies - far[:, experts : experts + 1]
        )
        / np.maximum(entropies, 1e-9),
        "router_logits": logsumexps
        / np.maximum(GROWN * usual_logsumexps + LEAST_Z, usual_logsumexps + far[:, experts + 1 :]),
    }


class RoutingWatch(Watch):
    """Of one process; without experts it does nothing. Every rank has the same sums, but biases in its own memory: what
    one rank finds in them all are told, and act on."""

    name = "routing"
    state: RoutingHistory

    def __init__(self, config: RunConfig, engine: Engine, log: RunLog) -> None:
        trend_settings = config.stability.trends
        is_enabled = config.stability.enabled and trend_settings.enabled
        self.enabled = is_enabled and config.model.experts is not None
        self.experts, self.start = config.model.experts, trend_settings.start
        self.engine, self.log = engine, log
        self.newest: RoutingSign | None = None  # of the last applied update, what may be undone
        self.state = RoutingHistory()

    @property
    def standing(self) -> list[str]:
        """What was warned of and is not over, a sentence for each place."""
        return list(self.state.standing.values())

    def after_update(self, measured: Measured, step: int, rate: float) -> None:
        self.newest = None
        if not self.enabled or measured.choices is None:
            return
        assert self.experts is not None
        told_before = {name.split()[0] for name in self.state.standing}
        with_bias = step % BIAS_EVERY == 0
        routed = self._read(measured.choices, with_bias)
        found_signs = self.state.judge_update(step, routed, self.experts.bias_rate, step > self.start)
        if with_bias:
            found_signs = self._agree(found_signs)
        self.newest = next(iter(found_signs), None)
        for signal in dict.fromkeys(sign.signal for sign in found_signs):
            own_signs = [sign for sign in found_signs if sign.signal == signal]
            other_count, worst_sign = len(own_signs) - 1, own_signs[0]
            sign_numbers = {"value": worst_sign.value, "usual": worst_sign.usual}
            more_text = f"; and so for {count_noun(other_count, 'other')}" if other_count else ""
            self._tell(TrendEvent(what="warned", step=step, signal=signal, text=worst_sign.reason + more_text,
                                  remedy=REMEDIES[signal], numbers=sign_numbers))  # fmt: skip
        for signal in told_before - {name.split()[0] for name in self.state.standing}:
            self._tell(
                TrendEvent(what="over", step=step, signal=signal, text="no longer", remedy="", numbers={})
            )

    def _agree(self, own_signs: list[RoutingSign]) -> list[RoutingSign]:
        """The signs that any rank has found, the farthest first. Collective."""
        (least_count,) = find_least([-len(own_signs)])
        if not least_count:
            return []
        every_sign = [sign for rank_signs in gather_objects(own_signs) for sign in rank_signs]
        by_place = {(sign.signal, sign.where): sign for sign in reversed(every_sign)}
        for sign in by_place.values():
            if sign.signal == BIAS:
                self.state.standing[f"{BIAS} {sign.layer} {sign.expert}"] = sign.reason
        return sorted(by_place.values(), key=lambda sign: -sign.severity)

    def _tell(self, event: TrendEvent) -> None:
        warning_mark = "WARNING: " if event.what == "warned" else ""
        self.log.emit_event(event, say=f"{warning_mark}{event.format_line()}")

    def _read(self, choices: torch.Tensor, with_bias: bool) -> Routed:
        assert self.experts is not None and self.engine.routing is not None
        bias_table = self.engine.routing.bias.double().cpu().numpy() if with_bias else None
        return Routed(choices.double().cpu().numpy(), self.experts.count, bias_table)

    def measure_routing(self) -> Routed:
        """Of the last update that the engine has applied, in the run or in a branch."""
        assert self.engine.routing is not None and self.engine.routing.newest is not None
        return self._read(self.engine.routing.newest, True)

    def accept_sign(self) -> None:
        """The newest sign was the run's own work."""
        if self.newest is not None:
            self.state.pause.begin_pause(self.newest.step)

    def begin_again(self) -> None:
        self.state.begin_again()

    def rewound(self, step: int, saved: Mapping[str, Any] | None) -> None:
        self.newest = None
        if saved is not None:
            pause_before = self.state.pause
            self.load_state_dict(saved)
            self.state.pause = pause_before
