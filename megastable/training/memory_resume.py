"""Restores the newest snapshot from the memories of the hosts, if it is newer than every checkpoint. Collective.

Weights and moments are not read from the shared file system then. Whatever is missing, torn, outdated or wrong is said,
and the run resumes from a checkpoint as without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

from megastable.base.collectives import agree, first, gathered
from megastable.base.errors import CheckpointError, MegastableError
from megastable.checkpoint import store
from megastable.checkpoint.held_points import Complete, HeldPart, PointKey, newest_complete
from megastable.checkpoint.lineage import HISTORY, outdated, tainted
from megastable.checkpoint.memory_hosts import MemoryHosts
from megastable.checkpoint.parts import write_manifest
from megastable.checkpoint.store import RunState
from megastable.checkpoint.whole import WholeState, check_model, check_optimizer
from megastable.engine.engine import Engine
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import MemoryRefused, MemoryResume
from megastable.run.log import RunLog
from megastable.training.checkpoints import Checkpoints
from megastable.training.data_order import DataOrder

AS_NEW = "a checkpoint is as new"


class Restoring:
    """restored: the point that the engine holds; spoilt: whether the engine holds parts of a point that failed."""

    def __init__(
        self, hosts: MemoryHosts, engine: Engine, run: RunDirectory, log: RunLog, checkpoints: Checkpoints,
        order: DataOrder,
    ) -> None:  # fmt: skip
        self.hosts, self.engine, self.run, self.log = hosts, engine, run, log
        self.checkpoints, self.order = checkpoints, order
        self.restored: PointKey | None = None
        self.spoilt = False
        self._failed: dict[PointKey, str] = {}
        self._told = set[PointKey]()

    def restore(
        self, newer_than: int, convicted: Collection[int], layout: store.LayoutState
    ) -> tuple[Path, RunState] | None:
        """Load the newest usable point of a step after `newer_than`; its folder and state. convicted: the steps of
        checkpoints whose content was. None if there is none."""
        held = self.hosts.held()
        if not any(held):
            return None
        while True:
            found, passed = first(lambda: self._choose(held, newer_than, convicted))
            for key, reason in passed.items():
                self._refused(key, reason)
            if found is None:
                return None
            problem, saved = self._load(found, layout)
            if saved is not None:
                self.restored = found.key
                return self.hosts.folder.point(found.key), saved
            self._failed[found.key] = problem

    def _choose(
        self, held: list[list[HeldPart]], newer_than: int, convicted: Collection[int]
    ) -> tuple[Complete | None, dict[PointKey, str]]:
        events = list(self.run.events(*HISTORY))

        def refuse(key: PointKey) -> str:
            if key.step <= newer_than:
                return AS_NEW
            return self._failed.get(key) or outdated(events, key) or tainted(key, newer_than, convicted)

        return newest_complete(held, refuse)

    def _refused(self, key: PointKey, reason: str) -> None:
        if reason == AS_NEW or key in self._told:
            return
        self._told.add(key)
        self.log.emit(
            MemoryRefused(step=key.step, lineage=key.lineage, reason=reason),
            say=f"the copy of step {key.step} in the hosts' memory is not used: {reason}",
        )

    def _load(self, found: Complete, layout: store.LayoutState) -> tuple[str, RunState | None]:
        """The problem, or the state, which the engine holds then."""
        folder, key = self.hosts.folder.point(found.key), found.key
        self.log.emit(MemoryResume(step=key.step, lineage=key.lineage, epoch=key.epoch))
        small = sorted(name for name in found.files if not name.endswith(".safetensors"))
        at, count = self.hosts.local.index(self.hosts.rank), len(self.hosts.local)
        if problem := _first(self.hosts.bring(found, small[at::count])):
            return problem, None
        try:
            saved = agree(lambda: store.read_state(folder))
            agree(lambda: self._describe(found, saved))
            agree(lambda: self._check(folder, saved))
            needed = agree(lambda: self._needed(folder))
        except MegastableError as error:
            return str(error), None
        everyone = gathered(needed)
        mine = [
            name for name in sorted(needed)
            if next(rank for rank in self.hosts.local if name in everyone[rank]) == self.hosts.rank
        ]  # fmt: skip
        if problem := _first(self.hosts.bring(found, mine)):
            return problem, None
        self.spoilt = True
        try:
            self.checkpoints.load(folder, saved, layout)
        except MegastableError as error:
            return str(error), None
        norms = self.engine.flat_state().norms()
        if not math.isfinite(norms.parameters + norms.second_moment):
            return "weights or moments are not finite", None
        self.spoilt = False
        self._seal(found)
        return "", saved

    def _describe(self, found: Complete, saved: RunState) -> None:
        """Write the manifest, without which the files are no checkpoint."""
        if self.hosts.leads:
            folder = self.hosts.folder.point(found.key)
            try:
                write_manifest(folder, saved, self.engine.config.model, found.files)
            except OSError as error:
                raise CheckpointError(f"{folder}: {error}") from None

    def _check(self, folder: Path, saved: RunState) -> None:
        """What may be refused while the engine is still untouched. Raises CheckpointError."""
        if self.order.exchanged_since(saved) != []:
            raise CheckpointError("the order of the data has changed since")
        check_model(folder, self.engine.config.model)
        check_optimizer(folder, saved, self.engine.config.optimizer.name)

    def _needed(self, folder: Path) -> set[str]:
        """The large files that this rank reads."""
        whole, topology = WholeState(folder), self.engine.topology
        whole.check_fits(self.engine.config.model)
        names = {store.SHARED} & store.read_contents(folder).files.keys()
        for f in self.engine.flat_state().fragments:
            names |= whole.files(f.name, topology.tensor_rank, topology.layout.tensor, f.start, f.numel)
        return names

    def _seal(self, found: Complete) -> None:
        """Parts that this host has fetched as a whole are copies from now on, too."""
        folder = self.hosts.folder.point(found.key)
        for rank, part in found.parts.items() if self.hosts.leads else ():
            here = all((folder / name).exists() for name in part.files)
            if here and self.hosts.host not in found.hosts[rank]:
                try:
                    self.hosts.folder.seal(part)
                except OSError:
                    return  # it is only one copy fewer


def _first(problem: str) -> str:
    """The first rank's problem. Collective."""
    return next((told for told in gathered(problem) if told), "")
