"""Measure what the phase timers of step records cost in a step.

    python -m benchmarks.phase_timer_cost --steps 80

One rank trains 5M parameters. In the same run, every other block of four steps has no timers: what a step enters is
then told to nobody. The processor time of a step scatters by more than timers take, so their own calls are timed, too:
that sum includes the two readings of the clock around each call, and is an upper bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hardware_watch_cost import parser, trained
from benchmarks.ranks import launch
from megastable.config.tree import RunConfig

BLOCK = 4  # steps
FIRST = 4  # steps that are left out
LIMIT = 0.002  # of a step


def measure(config: RunConfig) -> list[tuple[bool, float, float]]:
    """For every step: whether it had timers, its seconds, and those of the timers' calls."""
    from megastable.base import activity
    from megastable.engine.engine import Engine
    from megastable.train import train
    from megastable.training.observer import Observer

    rows: list[tuple[bool, float, float]] = []
    spent, on = [0.0], [True]

    def timed(call: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            if not on[0]:
                return instead(*args)
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent[0] += time.perf_counter() - begin

        return inner

    def nothing(*_: Any) -> None: ...

    for name in ("begin", "end", "enter", "waited"):
        setattr(activity, name, timed(getattr(activity, name), nothing))
    phases = Observer._with_phases
    Observer._with_phases = timed(phases, lambda _, record: record)  # type: ignore[method-assign]
    real, since = Engine.train_step, [0.0]

    def train_step(self: Engine, *args: Any) -> Any:
        begin = time.perf_counter()
        found = real(self, *args)
        seconds = time.perf_counter() - begin
        rows.append((on[0], seconds, spent[0] - since[0]))
        since[0], on[0] = spent[0], len(rows) // BLOCK % 2 == 0
        return found

    Engine.train_step = train_step  # type: ignore[method-assign,assignment]
    train(config, Path("recipe.yaml"))
    return rows[FIRST:]


def main(arguments: list[str] | None = None) -> None:
    args = parser(__doc__, 80, "in a step").parse_args(arguments)
    with trained(args.steps, args.samples) as config:
        train = config.train.model_copy(update={"global_batch": args.samples})
        stability = config.stability.model_copy(update={"enabled": False})
        config = config.model_copy(update={"train": train, "stability": stability})
        (rows,) = launch(1, measure, config, 60 * args.minutes)
    having, without = ([s for timers, s, _ in rows if timers is kind] for kind in (True, False))
    step = statistics.median(without)
    own = statistics.median(cost for timers, _, cost in rows if timers)
    ratio = statistics.median(having) / step
    print(
        f"a step takes {1e3 * step:.1f} ms; calls of the timers {1e6 * own:.0f} us, {own / step:.4%} of it at most; "
        f"steps with timers to those without in the same run: {ratio:.3f} (medians of {len(having)} and {len(without)})"
    )
    if own / step > LIMIT:
        raise SystemExit(f"more than {LIMIT:.1%}")


if __name__ == "__main__":
    main()
