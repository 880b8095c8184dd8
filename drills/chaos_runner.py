"""Runs a small training on hosts made of namespaces, under the real supervisor, lets a fault strike, and says what
became of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drills.chaos import STARTING, Planned
from drills.chaos_table import Row, row
from drills.cluster_faults import Cluster, Kind
from drills.hosts import Host, Hosts
from drills.namespaces import Started
from megastable.base.errors import OK, ConfigError

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


class Over(ConfigError):
    """The run was complete before the fault."""


@dataclass(frozen=True)
class Exercise:
    """The run that all faults happen to. corpus: prepared. hosts: that train; spares: that stand by.
    patience: overrides of the supervisor's limits."""

    corpus: Path
    steps: int
    hosts: int
    spares: int = 0
    patience: Sequence[str] = ()

    def words(self, run: Path, hostfile: Path) -> list[str]:
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


class Exercised:
    """One run of it on hosts of its own; folder: empty, for all that belongs to it."""

    def __init__(self, exercise: Exercise, folder: Path, hosts: Hosts, endless: float = ENDLESS) -> None:
        self.exercise, self.folder, self.hosts, self.endless = exercise, folder, hosts, endless
        self.run, self.seen = hosts.shared.folder / "run", hosts.shared.outside / "run"
        self.output = folder / "output.txt"
        head = next(iter(hosts)).name
        self.cluster = Cluster(hosts, head, lambda: self._supervise(head))
        self.began = time.monotonic()
        self.cluster.start_supervisor()

    def _supervise(self, head: str) -> Started:
        words = self.exercise.words(self.run, self.folder / "hostfile")
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
        folder = self.seen / f"checkpoints/step-{self.exercise.steps}"
        return {
            path.name: hashlib.blake2b(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("*.safetensors"))
        }

    def verdict(self, since: float, said: int = 0) -> tuple[float | None, str, str | None]:
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
        """Copy what tools/goodput.py reads, and logs, from the shared disk, which goes with the hosts."""
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


def undisturbed(exercise: Exercise, folder: Path) -> Undisturbed:
    """Raises ConfigError if the run fails without any fault."""
    with Hosts(empty(folder), exercise.hosts + exercise.spares) as hosts:
        run = Exercised(exercise, folder, hosts, endless=max(ENDLESS, SLOWEST * exercise.steps))
        code = run.end()
        if code != 0:
            raise ConfigError(f"the run ended with {code} without a fault: {run.output.read_text()[-2000:]}")
        return Undisturbed(run.left(), time.monotonic() - run.began)


def struck(exercise: Exercise, folder: Path, kind: Kind, planned: Planned, clean: Undisturbed) -> Row:
    """What became of a fault."""
    with Hosts(empty(folder), exercise.hosts + exercise.spares) as hosts:
        run = Exercised(exercise, folder, hosts)
        host = hosts[planned.host]
        run.wait_for(planned)
        at = time.time()
        struck_by(kind, run, host)
        time.sleep(planned.seconds)
        kind.mend(run.cluster, host)
        code = run.end()
        seconds = time.monotonic() - run.began
        found, verdict, blamed = run.verdict(at)
        same = run.left() == clean.bytes if code == 0 else None
        cost = seconds - clean.seconds if code == 0 else None
        run.keep()
    return row(
        kind, planned, found=found, verdict=verdict, blamed=blamed, exit=code, same=same, cost=cost,
        spared=exercise.spares > 0,
    )  # fmt: skip


def struck_by(kind: Kind, run: Exercised, host: Host) -> None:
    """Do it. Raises Over, ConfigError if there is nothing to do it to; ranks come a moment after their launcher."""
    until = time.monotonic() + 20
    while not kind.strike(run.cluster, host):
        if time.monotonic() > until:
            raise run.broken(f"{kind.name}: there was nothing on {host} that it could happen to")
        time.sleep(LOOK)


def empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder
