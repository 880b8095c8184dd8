"""Runs a small training on hosts made of namespaces, under the real supervisor, lets faults strike, and says what
became of them: each in a run of its own."""

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

from pydantic import BaseModel, ConfigDict

from drills.cluster_faults import Cluster, Kind
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


def plan_faults(
    kinds: Sequence[Kind],
    hosts: Sequence[str],
    seed: int,
    faults: int,
    steps: int,
    seconds: float | None = None,
) -> list[Planned]:
    """`faults` of them in runs of `steps` steps: every kind once before any twice; likewise phases, and for every kind
    the hosts it may happen to. Neither in the first nor in the last tenth of the steps, except at the start.

    The first host is the supervisor's. seconds: of all faults that last; else drawn. Raises ConfigError if a kind has
    no host to happen to.
    """
    head = hosts[0]
    for kind in kinds:
        if not kind.possible_hosts(hosts, head):
            raise ConfigError(
                f"{kind.name} happens to {kind.place}, and there is only {head}: take more hosts"
            )
    if not kinds or steps < 1:
        raise ConfigError(f"{len(kinds)} kinds of faults in runs of {steps} steps: nothing can be planned")
    chance = random.Random(seed)
    ordered, phases = _rounds(kinds, chance), _rounds((STARTING, *PHASES), chance)
    places = {kind.name: _rounds(kind.possible_hosts(hosts, head), chance) for kind in kinds}
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
        nobody_text = f" or {NOBODY}" if self.harmless else ""
        return f"{self.expected}{nobody_text}" if self.expected else NOBODY

    def describe_end(self) -> str:
        if self.exit is None:
            return "never ended"
        if self.exit != OK:
            return f"exit {self.exit}"
        return {True: "yes", False: "no", None: "unknown"}[self.same]


def judge_fault(
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
    seconds_found, said, blamed_host = verdict
    return ClusterOutcome(
        planned=planned, found=seconds_found, verdict=said, blamed=blamed_host,
        expected=kind.host_to_blame(planned.host),
        harmless=kind.harmless, exit=exit, same=same, cost=cost,
        verdict_right=kind.accepts_verdict(said, blamed_host, planned.host),
        end_right=(exit == OK and same is True) if kind.back or spared else exit == HOST_GONE,
    )  # fmt: skip


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
        data_overrides = [
            f"data.corpora=[{{path: {self.corpus.resolve()}}}]",
            f"train.steps={self.steps}",
            f"run.dir={run}",
            f"supervise.spares={self.spares}",
        ]
        recipe = str(ROOT / "launch/recipes/quickstart.yaml")
        start_words = [sys.executable, str(ROOT / "launch/supervise.py"), recipe]
        return [*start_words, *MODEL, *self.patience, *data_overrides, "--", "--hostfile", str(hostfile)]


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
        head_host = next(iter(hosts)).name
        self.cluster = Cluster(hosts, head_host, lambda: self._supervise(head_host))
        self.began = time.monotonic()
        self.cluster.start_supervisor()

    def _supervise(self, head: str) -> Started:
        words = self.setup.words(self.run, self.folder / "hostfile")
        variables = {**VARIABLES, "PYTHONPATH": str(ROOT)}
        return self.hosts[head].start_process(words, self.output, variables, ROOT)

    def read_progress(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            progress_content = json.loads((self.seen / "progress.json").read_text())
            if isinstance(progress_content, dict):
                return progress_content
        return {}

    def wait_for(self, planned: Planned) -> None:
        """The moment to strike. Raises ConfigError if the run ends before."""
        while not self._due(planned):
            if self.cluster.supervisor is None or self.cluster.supervisor.poll() is not None:
                raise self.broken("the run ended before the fault")
            time.sleep(LOOK)

    def suffer(self, kind: Kind, planned: Planned) -> float:
        """Let a fault strike at its moment, and last; the time of it. Raises ConfigError if there is nothing to do it
        to; ranks come a moment after their launcher."""
        self.wait_for(planned)
        time_struck = time.time()
        wait_until = time.monotonic() + 20
        while not kind.strike(self.cluster, self.hosts[planned.host]):
            if time.monotonic() > wait_until:
                raise self.broken(f"{kind.name}: there was nothing on {planned.host} that it could happen to")
            time.sleep(LOOK)
        time.sleep(planned.seconds)
        return time_struck

    def broken(self, what: str) -> ConfigError:
        """The error to raise, with the end of the output."""
        return ConfigError(f"{what}: {self.output.read_text()[-2000:]}")

    def _due(self, planned: Planned) -> bool:
        run_progress = self.read_progress()
        if planned.phase == STARTING:
            return bool(run_progress) or bool(self.hosts[planned.host].ranks())
        steps_done = run_progress.get("step") or 0
        return steps_done >= planned.step and (
            run_progress.get("phase") == planned.phase or steps_done >= planned.step + PHASE_MISSED
        )

    def wait_for_end(self) -> int | None:
        """The supervisor's exit code; None if it never ends."""
        while time.monotonic() - self.began < self.endless:
            assert self.cluster.supervisor is not None
            if (exit_code := self.cluster.supervisor.poll()) is not None:
                return exit_code
            time.sleep(0.1)
        return None

    def hash_checkpoint(self) -> dict[str, str]:
        """The bytes of the last checkpoint, hashed, by file."""
        checkpoint_folder = self.seen / f"checkpoints/step-{self.setup.steps}"
        return {
            shard_path.name: hashlib.blake2b(shard_path.read_bytes()).hexdigest()
            for shard_path in sorted(checkpoint_folder.glob("*.safetensors"))
        }

    def read_verdict(self, since: float) -> Verdict:
        """Seconds until the first verdict after `since`, what it says, and the host that it blames."""
        for event in self._events():
            if event.get("time", 0) > since and event.get("event") == "ended" and event.get("what"):
                return event["time"] - since, str(event["failure"]), event["host"]
            if (
                event.get("time", 0) > since
                and event.get("event") == "host_slow"
                and event.get("what") == "begun"
            ):
                return event["time"] - since, str(event["reason"]), event["host"]
        for output_line in self.output.read_text(errors="replace").splitlines():
            if output_line.startswith("WARNING") and "has not answered" in output_line:
                return None, output_line, None
        return None, "", None

    def keep_files(self) -> None:
        """Copy what megastable goodput reads, and logs, from the shared disk, which goes with the hosts."""
        for kept_name in ("journal.jsonl", "recipe.yaml", "summary.json", "progress.json"):
            with suppress(FileNotFoundError):
                shutil.copy2(self.seen / kept_name, self.folder)
        for kept_name in ("logs", "steps", "incidents"):
            with suppress(FileNotFoundError):
                shutil.copytree(self.seen / kept_name, self.folder / kept_name, dirs_exist_ok=True)

    def _events(self) -> list[dict[str, Any]]:
        journal_events = []
        with suppress(OSError):
            for journal_line in (self.seen / "journal.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    journal_events.append(json.loads(journal_line))
        return journal_events


def run_undisturbed(setup: ClusterSetup, folder: Path) -> Undisturbed:
    """Raises ConfigError if the run fails without any fault."""
    with Hosts(make_empty(folder), setup.hosts + setup.spares) as hosts:
        run = ClusterRun(setup, folder, hosts, endless=max(ENDLESS, SLOWEST * setup.steps))
        code = run.wait_for_end()
        if code != 0:
            raise ConfigError(f"the run ended with {code} without a fault: {run.output.read_text()[-2000:]}")
        return Undisturbed(run.hash_checkpoint(), time.monotonic() - run.began)


def make_empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder


def _is_verdict_wrong(row: Sequence[ClusterOutcome]) -> bool:
    return not row[0].verdict_right


class ChaosDrill(Drill[ClusterOutcome]):
    """Planned faults of a cluster."""

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

    def __init__(self, setup: ClusterSetup, kinds: Sequence[Kind], planned: Sequence[Planned]) -> None:
        self.setup, self.kinds = setup, {kind.name: kind for kind in kinds}
        self.planned = planned

    def plan_exercises(self, folder: Path) -> list[Exercise[ClusterOutcome]]:
        if self.setup.corpus is None:
            self.setup = replace(self.setup, corpus=folder / "corpus")
            prepare_stdlib(folder / "corpus", vocab_size=VOCABULARY, workers=2, progress=False)
        self.undisturbed_folder = folder / "undisturbed"
        return [
            Exercise(f"{one.describe()} on {one.host}", self.setup.steps, partial(self._run_one, one, folder))
            for one in self.planned
        ]

    def _run_one(self, planned: Planned, folder: Path, watch: Watch) -> list[ClusterOutcome]:
        setup, kind, undisturbed_run = self.setup, self.kinds[planned.kind], self.undisturbed
        folder = make_empty(folder / f"{planned.number:02d}-{planned.kind}")
        with Hosts(folder, setup.hosts + setup.spares) as hosts:
            run = ClusterRun(setup, folder, hosts)
            time_struck = run.suffer(kind, planned)
            kind.mend(run.cluster, hosts[planned.host])
            exit_code = run.wait_for_end()
            run_seconds = time.monotonic() - run.began
            verdict = run.read_verdict(time_struck)
            same_bytes = run.hash_checkpoint() == undisturbed_run.bytes if exit_code == OK else None
            run.keep_files()
        extra_seconds = run_seconds - undisturbed_run.seconds if exit_code == OK else None
        return [
            judge_fault(kind, planned, verdict, exit_code, same_bytes, extra_seconds, spared=setup.spares > 0)
        ]

    @cached_property
    def undisturbed(self) -> Undisturbed:
        """What all runs are compared with, done before the first of them."""
        return run_undisturbed(self.setup, self.undisturbed_folder)

    def row_of(self, outcome: ClusterOutcome) -> tuple[Hashable, Hashable]:
        return outcome.planned.number, 0

    def is_met(self, outcomes: Sequence[ClusterOutcome]) -> bool:
        return all(fault_outcome.right for fault_outcome in outcomes) and len(outcomes) == len(self.planned)

    def describe_verdict(self, outcomes: Sequence[ClusterOutcome]) -> str:
        right_verdicts, ended = sum(o.verdict_right for o in outcomes), sum(o.end_right for o in outcomes)
        seconds_found = [o.found for o in outcomes if o.found is not None]
        longest = f", found after at most {max(seconds_found):.1f} s" if seconds_found else ""
        return f"{len(outcomes)} faults: {ended} runs ended as they should, {right_verdicts} verdicts right{longest}"

    def report_outcomes(self, outcomes: Sequence[ClusterOutcome]) -> list[dict[str, Any]]:
        return [outcome.model_dump(mode="json") | {"right": outcome.right} for outcome in outcomes]
