"""One run: a process that trains, and becomes two where a watcher acts.

A watcher that has not acted yet has the run that clipping alone has. So all watchers sit in one process, and when one
of them acts the process forks: the child goes on with that watcher alone. Runs fork at the fault's step, too: what
comes before is trained once for all faults.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.ruler.contestants import APPLY, BOUNDS, Action, Watcher, gradients_norm
from benchmarks.ruler.faults import FAULTS, Data, Fault, hook_fault, lay_data
from benchmarks.ruler.task import BATCH, STEP, STEPS, Rows, build_model, scheduled_rate, validate

CLIPPING = "clipping"
EVERY = 50  # steps from one checkpoint to the next


class Run:
    """A model in training. step: updates done or refused; position: steps of the data that were read."""

    def __init__(self, size: str, seed: int, bound: str, texts: dict[str, Rows]) -> None:
        self.size, self.seed, self.bound, self.texts = size, seed, bound, texts
        torch.manual_seed(seed)
        self.model = build_model(size, seed)
        groups = [{"params": [parameter]} for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.data: Data = lay_data(texts, seed)
        self.memory: dict[str, Any] = {}  # of the bound
        self.watchers: list[Watcher] = []
        self.alone = False  # with a watcher that has acted
        self.fault: Fault | None = None
        self.fault_steps = 0  # in which it was at work
        self.struck = False
        self.step = self.position = 0
        self.timeline: list[
            tuple[Rows, int]
        ] = []  # rows of each update, none if it was refused; position after it
        self.read: set[int] = set()
        self.skipped_steps: set[int] = set()
        self.copies: dict[int, dict[str, Any]] = {}
        self.facts = {"refused": 0, "rewinds": 0, "undone": 0, "computed": 0, "early": 0, "measured": 0.0}
        self.first_action: int | None = None
        self.failed: dict[str, str] = {}  # watchers that raised, and what

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)

    def position_at(self, step: int) -> int:
        """Steps of the data that were read when `step` updates were done."""
        return self.timeline[step - 1][1] if step else 0

    def newest_copy(self, most: int) -> int:
        """The step of the newest copy of at most `most` updates."""
        return max(step for step in self.copies if step <= most)

    def fetch_rows(self) -> Rows:
        """Positions of the next step's rows."""
        for watcher in self.watchers:
            if watcher.rows is not None:  # before it acts, in lockstep
                own_rows = np.fromiter(itertools.islice(watcher.rows, BATCH), np.int64)
                if self.alone:
                    return own_rows
        while self.position in self.skipped_steps:
            self.read |= set(range(self.position * BATCH, (self.position + 1) * BATCH))
            self.position += 1
        return self.position * BATCH + np.arange(BATCH)

    def train_step(self) -> None:
        """One step, with all that may happen in it."""
        if self.step % EVERY == 0 and self.step not in self.copies:
            self.copies[self.step] = {
                "model": copy.deepcopy(self.model.state_dict()),
                "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            }
        rows = self.fetch_rows()
        self.position += 1
        self.read.update(rows.tolist())
        number = self.step + 1
        fault = self.fault if self.fault and number >= STEP else None
        happens = fault is not None and self.fault_steps < fault.steps  # in executed steps
        is_wrong_rate = fault is not None and number < STEP + fault.steps
        for group in self.optimizer.param_groups:
            group["lr"] = scheduled_rate(self.size, number) * (fault.rate if fault and is_wrong_rate else 1.0)
        handle = None
        if fault and happens and fault.hook:
            hook = fault.hook
            handle = hook_fault(self.model, fault).register_forward_hook(
                lambda module, given, output: hook(output)
            )
        inputs, labels = (torch.from_numpy(array[rows]) for array in (self.data.inputs, self.data.labels))
        loss = self.model(inputs, labels)
        loss.backward()
        if handle is not None:
            handle.remove()
        loss_value = float(loss.detach())
        if fault and happens:
            self.fault_steps += 1
            if fault.gradient:
                fault.gradient(self.model)
            if fault.loss is not None:
                loss_value = fault.loss
                for gradient in self.gradients():
                    gradient.fill_(math.nan)
        self.facts["computed"] += 1
        norm = gradients_norm(self.gradients())
        for watcher in list(self.watchers):
            action = self.ask_watcher(watcher, partial(watcher.judge_step, self, loss_value, norm))
            if action.kind != "apply" and self.becomes(watcher):
                self.carry_out(action, watcher, rows)
                return
        BOUNDS[self.bound][1](self, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.timeline.append((rows, self.position))
        if fault and fault.update and not self.struck:
            self.struck = True
            with torch.no_grad():
                fault.update(self.model, self.optimizer, torch.Generator().manual_seed(self.seed))
        for watcher in list(self.watchers):
            action = self.ask_watcher(watcher, partial(watcher.judge_update, self, loss_value))
            if action.kind != "apply" and self.becomes(watcher):
                self.carry_out(action, watcher, rows)
                return

    def ask_watcher(self, watcher: Watcher, ask: Callable[[], Action]) -> Action:
        """What raises in a run of several is the result of that watcher, and of nobody else."""
        try:
            return ask()
        except Exception as error:
            if self.alone:
                raise
            self.failed[watcher.name] = f"{type(error).__name__}: {error}"
            self.watchers.remove(watcher)
            return APPLY

    def becomes(self, watcher: Watcher) -> bool:
        """Whether this process goes on as the run of a watcher that acts; else a child of it does, and was waited
        for."""
        if self.alone:
            return True
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            self.watchers.remove(watcher)
            return False
        self.alone, self.watchers = True, [watcher]
        return True

    def carry_out(self, action: Action, watcher: Watcher, rows: Rows) -> None:
        """Refuse the update, or go back."""
        self.first_action = self.step + 1 if self.first_action is None else self.first_action
        if self.fault is None:
            self.facts["early"] += 1
        self.optimizer.zero_grad()
        if action.kind == "refuse":
            self.facts["refused"] += 1
            self.step += 1
            self.timeline.append((rows[:0], self.position))
            return
        own_step = watcher.rewind(self.step + 1)
        if own_step is not None:
            target_step, self.position = own_step, self.position_at(own_step)
        else:
            target_step = self.newest_copy(action.back)
            saved = self.copies[target_step]
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            self.read |= set(range(self.position * BATCH, action.position * BATCH))
            self.position = action.position
        self.facts["rewinds"] += 1
        self.facts["undone"] += self.step - target_step
        self.step = target_step
        del self.timeline[target_step:]
        self.copies = {step: saved for step, saved in self.copies.items() if step <= target_step}

    def train_until(self, step: int) -> None:
        while self.step < step:
            if self.facts["computed"] > 3 * STEPS:
                raise RuntimeError(f"{self.facts} after step {self.step}: this run does not end")
            self.train_step()

    def install_fault(self, fault: Fault) -> None:
        if fault.plant:
            self.data = copy.deepcopy(self.data)
            fault.plant(self.data, self.texts, np.random.default_rng([self.seed, 2]))
        self.fault = fault

    def summarize(self, seconds: float) -> dict[str, Any]:
        """Facts of a finished run."""
        applied = [rows for rows, _ in self.timeline]
        trained = set(np.concatenate(applied).tolist())
        loss = validate(self.model, self.data.held)
        return {
            **self.facts,
            "loss": loss if math.isfinite(loss) else None,
            "lost": len(self.read - trained - self.data.planted),
            "bad_trained": len(trained & self.data.planted),
            "planted": len(self.data.planted),
            "first": self.first_action,
            "seconds": round(seconds, 2),
        }


Key = tuple[str, int, str, str]  # size, seed, contestant, fault


def run_family(
    family: tuple[str, int, str], watchers: dict[str, type[Watcher]], texts: dict[str, Rows], wanted: set[Key],
    save: Callable[[Key, dict[str, Any]], None],
) -> None:  # fmt: skip
    """All runs of a size, a seed and a bound, and of the watchers if it is clipping, with all wanted faults; or of a
    watcher that changes the rounding. In this process and its children."""
    size, seed, name = family
    bound = name if name in BOUNDS else CLIPPING
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run = Run(size, seed, bound, texts)
    if name == CLIPPING:
        watched = {watcher for s, d, watcher, _ in wanted if (s, d) == (size, seed)}
        shared_kinds = [kind for kind in watchers.values() if not kind.changes_rounding]
        run.watchers = [kind(run) for kind in shared_kinds if kind.name in watched]
    elif name in watchers:
        run.alone, run.watchers = True, [watchers[name](run)]
    origin = os.getpid()
    run.train_until(STEP - 1)
    for fault in FAULTS:
        names = (
            [watcher.name for watcher in run.watchers]
            if run.alone
            else [bound, *(w.name for w in run.watchers)]
        )
        if not any((size, seed, name, fault.name) in wanted for name in names):
            continue
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        begun = time.perf_counter()
        run.install_fault(fault)
        try:
            run.train_until(STEPS)
            facts = run.summarize(time.perf_counter() - begun)
        except Exception as error:  # a contestant's, which is its result
            traceback.print_exc()
            facts = {**run.facts, "loss": None, "error": f"{type(error).__name__}: {error}"}
        names = [run.watchers[0].name] if run.alone else [bound, *(watcher.name for watcher in run.watchers)]
        told = dict.fromkeys(names, facts)
        told |= {name: {**facts, "loss": None, "error": error} for name, error in run.failed.items()}
        for name, own_facts in told.items():
            if (size, seed, name, fault.name) in wanted:
                save((size, seed, name, fault.name), own_facts)
        os._exit(0)
    if os.getpid() != origin:
        os._exit(0)


def append_result(path: Path, key: Sequence[Any], version: str, facts: dict[str, Any]) -> None:
    """A line, in one write: several processes append."""
    line = json.dumps({"key": list(key), "version": version, **facts}) + "\n"
    with path.open("a") as file:
        file.write(line)
