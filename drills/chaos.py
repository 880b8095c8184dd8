"""Runs a small training on hosts made of namespaces, under the real supervisor, lets faults strike, and says what
became of them: each in a run of its own, or all in one run, each after it has got over the one before."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from drills.cluster_faults import Cluster, Kind, choose
from drills.exercise import Column, Drill, Exercise, Outcome, Watch, describe_only
from drills.hosts import Hosts
from drills.namespaces import Started
from drills.stage import VOCABULARY
from megastable.base.errors import HOST_GONE, OK, ConfigError
from megastable_tools.prepare.stdlib import prepare_stdlib

# What rank 0 is doing when the fault strikes (rank_ipc.Progress), besides "starting", which no step belongs to.
PHASES = ("step", "checkpoint", "evaluate")
STARTING = "starting"
NOBODY = "nobody"
Verdict = tuple[float | None, str, str | None]  # seconds until it, a sentence, the host that it blames
Item = TypeVar("Item")

ROOT = Path(__file__).parents[1]
LOOK = 0.02  # seconds between two looks for the moment to strike
PHASE_MISSED = 60  # steps after which a fault strikes in whatever phase: short ones are easily missed
SLOWEST = 1.0  # seconds for a step on a busy machine
ENDLESS = 420.0  # seconds after which a run counts as one that never ends
MODEL = (
    "model.layers=2 model.hidden=64 model.heads=2 model.kv_heads=1 model.ffn=128 model.sequence_length=64 "
    "train.global_batch=12 train.micro_batch=2 train.eval_samples=12 train.eval_interval=50 checkpoint.interval=25 "
    "checkpoint.keep=2 logging.trackers=[] logging.peak_tflops=1"
).split()
OVER = 10  # steps without a fault after which a run has got over the one before
PATIENT = 300.0  # seconds for that
# Of all faults in one run: each is planned, and a budget for what nobody planned is no use.
BUDGETS = ("stability.policy.same_host=1000", "stability.policy.restarts=1000", "stability.policy.barren=100")
VARIABLES = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}


class Planned(BaseModel):
    """The `number`-th fault: of what kind, on which host. It strikes in `phase` once `step` steps are done, and lasts
    for `seconds`; 0: no longer than it takes to do it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    kind: str
    host: str
    phase: str
    step: int
    seconds: float

    def describe(self) -> str:
        return f"{self.kind} ({self.seconds:g} s)" if self.seconds else self.kind


def plan(
    kinds: Sequence[Kind],
    hosts: Sequence[str],
    seed: int,
    faults: int,
    steps: int,
    head: str | None = None,
    seconds: float | None = None,
) -> list[Planned]:
    """`faults` of them in runs of `steps` steps: every kind once before any twice; likewise phases, and for every kind
    the hosts it may happen to. Neither in the first nor in the last tenth of the steps, except at the start.

    head: the supervisor's host, the first one if None. seconds: of all faults that last; else drawn. Raises ConfigError
    if a kind has no host to happen to.
    """
    head = hosts[0] if head is None else head
    for kind in kinds:
        if not kind.places(hosts, head):
            raise ConfigError(
                f"{kind.name} happens to {kind.place}, and there is only {head}: take more hosts"
            )
    if not kinds or steps < 1:
        raise ConfigError(f"{len(kinds)} kinds of faults in runs of {steps} steps: nothing can be planned")
    chance = random.Random(seed)
    ordered, phases = _rounds(kinds, chance), _rounds((STARTING, *PHASES), chance)
    places = {kind.name: _rounds(kind.places(hosts, head), chance) for kind in kinds}
    planned = []
    for number, kind in zip(range(1, faults + 1), ordered):
        phase = PHASES[0] if kind.early else next(phases)
        step = chance.randint(min(steps, -(-steps // 10)), max(1, steps - -(-steps // 10)))
        step = min(step, max(1, steps // 4)) if kind.early else step
        drawn = round(chance.uniform(*kind.seconds), 1) if kind.seconds is not None else 0.0
        planned.append(
            Planned(
                number=number, kind=kind.name, host=next(places[kind.name]), phase=phase,
                step=0 if phase == STARTING else step,
                seconds=seconds if seconds is not None and kind.seconds is not None else drawn,
            )
        )  # fmt: skip
    return planned


def _rounds(items: Sequence[Item], chance: random.Random) -> Iterator[Item]:
    """All items in random order, again and again, each time in another one."""
    while True:
        yield from chance.sample(items, len(items))


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


class ClusterOutcome(Outcome):
    """A fault and its run. found: seconds from the fault to the verdict, None without one; verdict: a sentence, empty
    without one. blamed: the host it names; expected: the one that it had to name; harmless: whether there need not be a
    verdict. exit: code of the supervisor, None if
    it never ended. same: whether the bytes are those of an undisturbed run, None if it has not ended as one. cost:
    seconds that the run took longer than an undisturbed one."""

    planned: Planned
    found: float | None
    verdict: str
    blamed: str | None
    expected: str | None
    harmless: bool
    exit: int | None
    same: bool | None
    cost: float | None
    verdict_right: bool
    end_right: bool

    @property
    def right(self) -> bool:
        return self.verdict_right and self.end_right

    def describe(self) -> str:
        return f"{self.verdict or 'no verdict'}, {'right' if self.right else 'WRONG'}"

    def describe_expected(self) -> str:
        nobody = f" or {NOBODY}" if self.harmless else ""
        return f"{self.expected}{nobody}" if self.expected else NOBODY

    def describe_end(self) -> str:
        if self.exit is None:
            return "never ended"
        if self.exit != OK:
            return f"exit {self.exit}"
        return {True: "yes", False: "no", None: "unknown"}[self.same]


def judge(
    kind: Kind,
    planned: Planned,
    verdict: Verdict,
    exit: int | None,
    same: bool | None,
    cost: float | None,
    spared: bool = False,
) -> ClusterOutcome:
    """Judge what became of a fault.

    Args:
        kind: of the fault.
        planned: the fault.
        verdict: what was said of it.
        exit: code of the supervisor.
        same: whether the bytes are those of an undisturbed run.
        cost: seconds that the run took longer.
        spared: whether a host can take the place of another.
    """
    found, said, blamed = verdict
    return ClusterOutcome(
        planned=planned, found=found, verdict=said, blamed=blamed, expected=kind.blamed(planned.host),
        harmless=kind.harmless, exit=exit, same=same, cost=cost,
        verdict_right=kind.accepts(said, blamed, planned.host),
        end_right=(exit == OK and same is True) if kind.back or spared else exit == HOST_GONE,
    )  # fmt: skip


class Over(ConfigError):
    """The run was complete before the fault."""


@dataclass(frozen=True)
class ClusterSetup:
    """The run that all faults happen to. corpus: prepared; None: one of the standard library is. hosts: that train;
    spares: that stand by. patience: overrides of the supervisor's limits."""

    corpus: Path | None
    steps: int
    hosts: int
    spares: int = 0
    patience: Sequence[str] = ()

    def words(self, run: Path, hostfile: Path) -> list[str]:
        assert self.corpus is not None
        data = [
            f"data.corpora=[{{path: {self.corpus.resolve()}}}]",
            f"train.steps={self.steps}",
            f"run.dir={run}",
            f"supervise.spares={self.spares}",
        ]
        recipe = str(ROOT / "launch/recipes/quickstart.yaml")
        start = [sys.executable, str(ROOT / "launch/supervise.py"), recipe]
        return [*start, *MODEL, *self.patience, *data, "--", "--hostfile", str(hostfile)]


@dataclass(frozen=True)
class Undisturbed:
    """What a run without a fault leaves, and how long it takes in seconds."""

    bytes: dict[str, str]
    seconds: float


class ClusterRun:
    """One run of it on hosts of its own; folder: empty, for all that belongs to it."""

    def __init__(self, setup: ClusterSetup, folder: Path, hosts: Hosts, endless: float = ENDLESS) -> None:
        self.setup, self.folder, self.hosts, self.endless = setup, folder, hosts, endless
        self.run, self.seen = hosts.shared.folder / "run", hosts.shared.outside / "run"
        self.output = folder / "output.txt"
        head = next(iter(hosts)).name
        self.cluster = Cluster(hosts, head, lambda: self._supervise(head))
        self.began = time.monotonic()
        self.cluster.start_supervisor()

    def _supervise(self, head: str) -> Started:
        words = self.setup.words(self.run, self.folder / "hostfile")
        variables = {**VARIABLES, "PYTHONPATH": str(ROOT)}
        return self.hosts[head].start(words, self.output, variables, ROOT)

    def progress(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads((self.seen / "progress.json").read_text())
            if isinstance(found, dict):
                return found
        return {}

    def wait_for(self, planned: Planned) -> None:
        """The moment to strike. Raises Over, ConfigError if the run ends before."""
        while not self._due(planned):
            if self.cluster.supervisor is None or self.cluster.supervisor.poll() is not None:
                raise self.broken("the run ended before the fault")
            time.sleep(LOOK)

    def suffer(self, kind: Kind, planned: Planned) -> tuple[float, int]:
        """Let a fault strike at its moment, and last; the time of it, and the bytes of the output by then. Raises Over,
        ConfigError if there is nothing to do it to; ranks come a moment after their launcher."""
        self.wait_for(planned)
        at, said = time.time(), self.output.stat().st_size
        until = time.monotonic() + 20
        while not kind.strike(self.cluster, self.hosts[planned.host]):
            if time.monotonic() > until:
                raise self.broken(f"{kind.name}: there was nothing on {planned.host} that it could happen to")
            time.sleep(LOOK)
        time.sleep(planned.seconds)
        return at, said

    def broken(self, what: str) -> ConfigError:
        """The error to raise, with the end of the output."""
        complete = self.cluster.supervisor is not None and self.cluster.supervisor.poll() == OK
        return (Over if complete else ConfigError)(f"{what}: {self.output.read_text()[-2000:]}")

    def _due(self, planned: Planned) -> bool:
        p = self.progress()
        if planned.phase == STARTING:
            return bool(p) or bool(self.hosts[planned.host].ranks())
        done = p.get("step") or 0
        return done >= planned.step and (
            p.get("phase") == planned.phase or done >= planned.step + PHASE_MISSED
        )

    def end(self) -> int | None:
        """The supervisor's exit code; None if it never ends."""
        while time.monotonic() - self.began < self.endless:
            assert self.cluster.supervisor is not None
            if (code := self.cluster.supervisor.poll()) is not None:
                return code
            time.sleep(0.1)
        return None

    def left(self) -> dict[str, str]:
        """The bytes of the last checkpoint, hashed, by file."""
        folder = self.seen / f"checkpoints/step-{self.setup.steps}"
        return {
            path.name: hashlib.blake2b(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("*.safetensors"))
        }

    def verdict(self, since: float, said: int = 0) -> Verdict:
        """Seconds until the first verdict after `since`, what it says, and the host that it blames. said: bytes of the
        output by then."""
        for event in self._events():
            if event.get("time", 0) > since and event.get("event") == "ended" and event.get("what"):
                return event["time"] - since, str(event["failure"]), event["host"]
            if (
                event.get("time", 0) > since
                and event.get("event") == "host_slow"
                and event.get("what") == "begun"
            ):
                return event["time"] - since, str(event["reason"]), event["host"]
        for line in self.output.read_bytes()[said:].decode(errors="replace").splitlines():
            if line.startswith("WARNING") and "has not answered" in line:
                return None, line, None
        return None, "", None

    def keep(self) -> None:
        """Copy what megastable goodput reads, and logs, from the shared disk, which goes with the hosts."""
        for name in ("journal.jsonl", "recipe.yaml", "summary.json", "progress.json"):
            with suppress(FileNotFoundError):
                shutil.copy2(self.seen / name, self.folder)
        for name in ("logs", "steps", "incidents"):
            with suppress(FileNotFoundError):
                shutil.copytree(self.seen / name, self.folder / name, dirs_exist_ok=True)

    def lineup(self) -> list[str]:
        """The hosts of the newest attempt."""
        launched = [event for event in self._events() if event.get("event") == "launched"]
        return list(launched[-1]["hosts"]) if launched else []

    def _events(self) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError):
            for line in (self.seen / "journal.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found


def run_undisturbed(setup: ClusterSetup, folder: Path) -> Undisturbed:
    """Raises ConfigError if the run fails without any fault."""
    with Hosts(empty(folder), setup.hosts + setup.spares) as hosts:
        run = ClusterRun(setup, folder, hosts, endless=max(ENDLESS, SLOWEST * setup.steps))
        code = run.end()
        if code != 0:
            raise ConfigError(f"the run ended with {code} without a fault: {run.output.read_text()[-2000:]}")
        return Undisturbed(run.left(), time.monotonic() - run.began)


def wait_until_over(run: ClusterRun, at: float) -> None:
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
        time.sleep(0.1)
    raise ConfigError(f"no {OVER} steps within {PATIENT:.0f} s: {run.output.read_text()[-2000:]}")


def find_losses(run: ClusterRun, steps: int, code: int | None, clean: Undisturbed) -> Iterator[str]:
    """What is wrong with a run as a whole."""
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


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder


def _is_verdict_wrong(row: Sequence[ClusterOutcome]) -> bool:
    return not row[0].verdict_right


class ChaosDrill(Drill[ClusterOutcome]):
    """Planned faults of a cluster. problems: of all in one run, that run's as a whole."""

    columns = (
        Column[ClusterOutcome]("#", describe_only(lambda o: o.planned.number)),
        Column("fault", describe_only(lambda o: o.planned.describe()), left=True),
        Column[ClusterOutcome]("on", describe_only(lambda o: o.planned.host), left=True),
        Column("in", describe_only(lambda o: o.planned.phase), left=True),
        Column("at step", describe_only(lambda o: o.planned.step)),
        Column("found\nafter s", describe_only(lambda o: "" if o.found is None else f"{o.found:.1f}")),
        Column("verdict", describe_only(lambda o: o.verdict or "none"), _is_verdict_wrong, left=True, wrap=True),
        Column("blamed", describe_only(lambda o: o.blamed or NOBODY), _is_verdict_wrong, left=True),
        Column("expected", describe_only(lambda o: o.describe_expected()), left=True),
        Column("same\nbytes", describe_only(lambda o: o.describe_end()), lambda row: not row[0].end_right, left=True),
        Column("cost s", describe_only(lambda o: "" if o.cost is None else f"{o.cost:+.1f}")),
    )  # fmt: skip

    def __init__(
        self, setup: ClusterSetup, kinds: Sequence[Kind], planned: Sequence[Planned], one_run: bool
    ) -> None:
        self.setup, self.kinds = setup, {kind.name: kind for kind in kinds}
        self.planned, self.one_run, self.problems = planned, one_run, list[str]()

    def plan_exercises(self, folder: Path) -> list[Exercise[ClusterOutcome]]:
        if self.setup.corpus is None:
            self.setup = replace(self.setup, corpus=folder / "corpus")
            prepare_stdlib(folder / "corpus", vocab_size=VOCABULARY, workers=2, progress=False)
        self.undisturbed_folder = folder / "undisturbed"
        steps = self.setup.steps
        if self.one_run:
            planned = spread(self.planned, steps)
            name, run = (
                f"{len(planned)} faults in one run",
                partial(self._run_many, planned, folder / "one-run"),
            )
            return [Exercise(name, steps, run)]
        return [
            Exercise(f"{one.describe()} on {one.host}", steps, partial(self._run_one, one, folder))
            for one in self.planned
        ]

    def _run_one(self, planned: Planned, folder: Path, watch: Watch) -> list[ClusterOutcome]:
        setup, kind, clean = self.setup, self.kinds[planned.kind], self.undisturbed
        folder = empty(folder / f"{planned.number:02d}-{planned.kind}")
        with Hosts(folder, setup.hosts + setup.spares) as hosts:
            run = ClusterRun(setup, folder, hosts)
            at, _ = run.suffer(kind, planned)
            kind.mend(run.cluster, hosts[planned.host])
            code = run.end()
            seconds = time.monotonic() - run.began
            verdict = run.verdict(at)
            same = run.left() == clean.bytes if code == OK else None
            run.keep()
        cost = seconds - clean.seconds if code == OK else None
        return [judge(kind, planned, verdict, code, same, cost, spared=setup.spares > 0)]

    def _run_many(self, planned: Sequence[Planned], folder: Path, watch: Watch) -> list[ClusterOutcome]:
        clean = self.undisturbed
        setup = replace(self.setup, patience=(*self.setup.patience, *BUDGETS))
        with Hosts(empty(folder), setup.hosts + setup.spares) as hosts:
            run = ClusterRun(setup, folder, hosts, endless=PATIENT * len(planned))
            found = list[tuple[Kind, Planned, Verdict, float]]()
            try:
                with suppress(Over):
                    for one in planned:
                        watch(one.step)
                        found.append(self._suffer_and_recover(run, one))
                code = run.end()
            finally:
                run.keep()
            seconds = time.monotonic() - run.began
            wrong = list(find_losses(run, setup.steps, code, clean))
        more = f"{seconds:.0f} s, {seconds - clean.seconds:.0f} s more than without faults"
        self.problems = [more, *wrong]
        if left := len(planned) - len(found):
            self.problems.insert(1, f"the run was complete before {left} of the faults: --steps")
        return [
            judge(kind, one, verdict, code, not wrong, lost, spared=True)
            for kind, one, verdict, lost in found
        ]

    def _suffer_and_recover(self, run: ClusterRun, planned: Planned) -> tuple[Kind, Planned, Verdict, float]:
        kind, planned = self._move_to_ranks(run, planned)
        host = run.hosts[planned.host]
        at, said = run.suffer(kind, planned)
        if kind.back:
            kind.mend(run.cluster, host)
        wait_until_over(run, at)
        lost = time.time() - at
        if not kind.back:
            host.join()  # or there would soon be no host left
        return kind, planned, run.verdict(at, said), lost

    def _move_to_ranks(self, run: ClusterRun, planned: Planned) -> tuple[Kind, Planned]:
        """The fault, where it does something: a host that stands by has no ranks, so it happens to one that trains."""
        kind, lineup = self.kinds[planned.kind], run.lineup()
        if planned.host in lineup:
            return kind, planned
        if planned.kind == "killed-head":
            (kind,) = choose(["killed-supervisor"])
            return kind, planned.model_copy(update={"kind": kind.name, "seconds": 0.0})
        places = kind.places(lineup, run.cluster.head)
        if not places:
            return kind, planned  # the supervisor, wherever its host stands
        return kind, planned.model_copy(update={"host": places[planned.number % len(places)]})

    @cached_property
    def undisturbed(self) -> Undisturbed:
        """What all runs are compared with, done before the first of them."""
        return run_undisturbed(self.setup, self.undisturbed_folder)

    def row_of(self, outcome: ClusterOutcome) -> tuple[Hashable, Hashable]:
        return outcome.planned.number, 0

    def is_met(self, outcomes: Sequence[ClusterOutcome]) -> bool:
        return all(outcome.right for outcome in outcomes) and len(outcomes) == len(self.planned)

    def describe_verdict(self, outcomes: Sequence[ClusterOutcome]) -> str:
        named, ended = sum(o.verdict_right for o in outcomes), sum(o.end_right for o in outcomes)
        found = [o.found for o in outcomes if o.found is not None]
        longest = f", found after at most {max(found):.1f} s" if found else ""
        said = f"{len(outcomes)} faults: {ended} runs ended as they should, {named} verdicts right{longest}"
        return "\n".join([said, *self.problems])

    def report(self, outcomes: Sequence[ClusterOutcome]) -> list[dict[str, Any]]:
        return [outcome.model_dump(mode="json") | {"right": outcome.right} for outcome in outcomes]
