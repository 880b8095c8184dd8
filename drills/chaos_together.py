"""Lets many faults strike one run, one after the other, each after the run has got over the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from drills.chaos import STARTING, Planned
from drills.chaos_runner import Exercise, Exercised, Over, Undisturbed, empty, struck_by
from drills.chaos_table import Row, row
from drills.cluster_faults import Kind
from drills.hosts import Hosts
from megastable.base.errors import OK, ConfigError

LOOK = 0.1
OVER = 10  # steps without a fault after which a run has got over the one before
PATIENT = 300.0  # seconds for that
# Every fault is planned: a budget for what nobody planned is no use here.
BUDGETS = ("stability.policy.same_host=1000", "stability.policy.restarts=1000", "stability.policy.barren=100")


def spread(planned: Sequence[Planned], steps: int) -> list[Planned]:
    """The same faults, evenly over the steps of one run. It starts only once."""
    gap = steps * 0.9 / (len(planned) + 1)
    return [
        one.model_copy(update={
            "step": round(steps * 0.05 + gap * number),
            "phase": "step" if one.phase == STARTING else one.phase,
        })
        for number, one in enumerate(planned, 1)
    ]  # fmt: skip


def together(
    exercise: Exercise,
    folder: Path,
    kinds: Mapping[str, Kind],
    planned: Sequence[Planned],
    clean: Undisturbed,
    told: Callable[[Planned], None],
) -> tuple[list[Row], list[str]]:
    """What became of each fault, and what is wrong with the run as a whole. told: is told of each as it strikes."""
    exercise = replace(exercise, patience=(*exercise.patience, *BUDGETS))
    with Hosts(empty(folder), exercise.hosts + exercise.spares) as hosts:
        run = Exercised(exercise, folder, hosts, endless=PATIENT * len(planned))
        found, problems = [], list[str]()
        try:
            for one in planned:
                try:
                    found.append(_strike(run, kinds, one, told))
                except Over:
                    problems.append(
                        f"the run was complete before {len(planned) - len(found)} of the faults: --steps"
                    )
                    break
            code = run.end()
        finally:
            run.keep()
        seconds = time.monotonic() - run.began
        wrong = list(_wrong(run, exercise.steps, code, clean))
    same, cost = not wrong, seconds - clean.seconds
    rows = [
        row(
            kind,
            one,
            found=after,
            verdict=verdict,
            blamed=blamed,
            exit=code,
            same=same,
            cost=lost,
            spared=True,
        )
        for kind, one, (after, verdict, blamed), lost in found
    ]
    return rows, [f"{seconds:.0f} s, {cost:.0f} s more than without faults", *problems, *wrong]


Verdict = tuple[float | None, str, str | None]


def _strike(
    run: Exercised, kinds: Mapping[str, Kind], planned: Planned, told: Callable[[Planned], None]
) -> tuple[Kind, Planned, Verdict, float]:
    kind, planned = _here(run, kinds, planned)
    host = run.hosts[planned.host]
    run.wait_for(planned)
    told(planned)
    at, before, said = time.time(), time.monotonic(), run.output.stat().st_size
    struck_by(kind, run, host)
    time.sleep(planned.seconds)
    if kind.back:
        kind.mend(run.cluster, host)
    _got_over(run, at)
    lost = time.monotonic() - before
    if not kind.back:
        host.join()  # or there would soon be no host left
    return kind, planned, run.verdict(at, said), lost


def _here(run: Exercised, kinds: Mapping[str, Kind], planned: Planned) -> tuple[Kind, Planned]:
    """The fault, where it does something: a host that stands by has no ranks, so it happens to one that trains."""
    kind, lineup = kinds[planned.kind], run.lineup()
    if planned.host in lineup:
        return kind, planned
    if planned.kind == "killed-head":
        return kinds["killed-supervisor"], planned.model_copy(
            update={"kind": "killed-supervisor", "seconds": 0.0}
        )
    places = kind.places(lineup, run.cluster.head)
    if not places:
        return kind, planned  # the supervisor, wherever its host stands
    return kind, planned.model_copy(update={"host": places[planned.number % len(places)]})


def _got_over(run: Exercised, at: float) -> None:
    """Wait until steps are done again by processes that nothing is wrong with. Raises ConfigError if that does not
    happen."""
    until, began = time.monotonic() + PATIENT, None
    while time.monotonic() < until:
        if run.cluster.supervisor is None or run.cluster.supervisor.poll() not in (None, OK):
            raise ConfigError(f"the run ended: {run.output.read_text()[-2000:]}")
        if run.cluster.supervisor.poll() == OK:
            return
        p = run.progress()
        if p.get("time", 0) > at and p.get("step") is not None:
            attempt, step = p.get("attempt"), p["step"]
            if began is None or began[0] != attempt or step < began[1]:
                began = attempt, step
            if step >= began[1] + OVER:
                return
        time.sleep(LOOK)
    raise ConfigError(f"no {OVER} steps within {PATIENT:.0f} s: {run.output.read_text()[-2000:]}")


def _wrong(run: Exercised, steps: int, code: int | None, clean: Undisturbed) -> Iterator[str]:
    if code != OK:
        yield f"the run ended with {code}"
        return
    if run.left() != clean.bytes:
        yield "the bytes are not those of an undisturbed run"
    records = pq.read_table(run.seen / "steps").sort_by("step")
    newest = {
        row["step"]: row for row in records.select(["step", "first_position", "next_position"]).to_pylist()
    }
    if sorted(newest) != list(range(1, steps + 1)):
        yield f"{steps - len(newest)} steps have no record"
    cursor = 0
    for step in sorted(newest):
        if newest[step]["first_position"] != cursor:
            yield f"step {step} begins at {newest[step]['first_position']}, not {cursor}: samples lost or trained twice"
        cursor = newest[step]["next_position"]
