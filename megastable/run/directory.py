"""The run directory: its paths, frozen recipe, lock and journal.

A run is resumed from this directory alone. `journal.jsonl` is append-only and fsynced: every decision with its reason,
in order; it is the source of truth.
"""

from __future__ import annotations

import itertools
import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, overload

import yaml

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError
from megastable.base.text import make_visible
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.run.events.event import Event
from megastable.run.events.reading import event_of_line
from megastable.run.events.stability_events import Handover
from megastable.run.events.training_events import RolledBack, Training
from megastable_guard import run_files

log = logging.getLogger(__name__)

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if available: 20 times as fast
Kind = TypeVar("Kind", bound=Event)

# Sections on which the meaning of the weights in the directory depends.
IDENTITY = ("model", "run.seed")
# ... and keys of them that only affect computing or training.
FREE = (
    "model.max_positions", "model.z_loss", "model.experts.bias_rate", "model.experts.balance_loss",
    "model.experts.balance_over", "model.experts.router_z_loss",
)  # fmt: skip

as_json = run_files.as_json  # the guard writes journals, too


class RunDirectory:
    """Paths below `root`, and the journal."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.recipe = root / "recipe.yaml"
        self.journal = root / "journal.jsonl"
        self.skips = root / "skips.jsonl"
        self.blends = root / "blends.jsonl"
        self.changes = root / "changes.jsonl"  # requests (changes.py)
        self.steps = root / "steps"
        self.layers = root / "layers"
        self.checkpoints = root / "checkpoints"
        self.tensorboard = root / "tensorboard"
        self.summary = root / "summary.json"
        self.progress = root / "progress.json"
        self.control = root / "control.json"
        self.verified = root / "verified.json"  # validation shards that were read in full, and how they were
        self.store = root / "store.json"  # address of the supervisor (wire.py)
        self.logs = root / "logs"
        self.incidents = root / "incidents"
        self.profiles = root / "profiles"
        self.machines = root / "machines"
        self.waiting: list[str] = []  # events that the disk refused so far (log.py)

    @property
    def resuming(self) -> str:
        """What resumes the run, in words: a command that does not name the directory begins a new run."""
        return f"the same command with {shlex.quote(f'run.dir={self.root}')}"

    def name_run(self, config: RunConfig) -> str:
        """What the run is called: `run.name`, or the name of the directory."""
        return config.run.name or make_visible(self.root.resolve().name, 100) or "run"

    @overload
    def iterate_events(self) -> Iterator[Event]: ...

    @overload
    def iterate_events(self, *kinds: type[Kind]) -> Iterator[Kind]: ...

    def iterate_events(self, *kinds: type[Event]) -> Iterator[Event]:
        """The journal's events in order, of `kinds` only when given. A torn last line is left out, with a warning.

        Raises DataError for a malformed line.
        """
        return (event for _, event in self._numbered(*kinds))

    def _numbered(self, *kinds: type[Event]) -> Iterator[tuple[int, Event]]:
        """The events with their line numbers."""
        journal_lines, is_torn = durable.read_lines(self.journal)
        if is_torn:
            log.warning("%s: the last line was torn by a crash and is ignored", self.journal)
        for line_number, event in enumerate(map(event_of_line, journal_lines), start=1):
            if "event" not in event:
                raise DataError(
                    f"{self.journal}: line {line_number} is not an event in JSON: mend or remove that line"
                )
            if not kinds or isinstance(event, kinds):
                yield line_number, event

    def find_handover(self) -> int | None:
        """The step before which a checkpoint must be, if the last process ended by a handover."""
        told = list(self._numbered(Handover, RolledBack, Training))
        if not told or not isinstance(told[-1][1], Handover):
            return None
        number, last = told[-1]
        if not isinstance(last.get("before"), int):
            raise DataError(
                f"{self.journal}: line {number} is a handover without the step (before=) that it goes back behind: "
                "mend that line, or remove it to go on from the newest checkpoint"
            )
        return int(last["before"])

    def find_rollback(self) -> tuple[int, int, float] | None:
        """If a person has rolled the run back since it last trained: the number of the rollback, its step and time."""
        told = list(self.iterate_events(RolledBack, Training))
        if not told or isinstance(told[-1], Training):
            return None
        number, step = sum(isinstance(event, RolledBack) for event in told), told[-1].get("step")
        if not isinstance(step, int):
            raise DataError(
                f"{self.journal}: a rollback without its step: remove the last line that tells of one"
            )
        return number, step, told[-1].time or 0.0

    def compare_recipe(self, config: RunConfig, recipe: Path | None = None) -> list[str]:
        """Differences from the frozen recipe, as "key: old -> new"; none if nothing is frozen yet. recipe: that of a
        checkpoint, to compare with instead.

        Raises ConfigError if this directory belongs to another model or seed.
        """
        recipe = recipe or self.recipe
        if not recipe.exists():
            return []
        try:
            old = yaml.load(recipe.read_text(encoding="utf-8"), LOADER)["config"]
            # A key of the model that the recipe does not have had its default value.
            old |= {"model": ModelConfig().model_dump(mode="json") | old["model"]}
        except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{recipe}: not a frozen recipe ({error}): restore it, or use another run.dir"
            ) from None
        before, after = dict(_leaves(old)), dict(_leaves(config.model_dump(mode="json")))
        if config.model.vocab_size is None:  # the tokenizer has not been read yet
            after["model.vocab_size"] = before.get("model.vocab_size")
        before, after = _folded(before, after), _folded(after, before)
        changed_leaves = {
            key: f"{key}: {before.get(key)} -> {after.get(key)}"
            for key in sorted({*before, *after} - {"run.dir"})
            if before.get(key) != after.get(key)
        }
        foreign_keys = [
            leave_key
            for leave_key in changed_leaves
            if _below(leave_key, IDENTITY) and not _below(leave_key, FREE)
        ]
        if foreign_keys:
            foreign_changes = "; ".join(changed_leaves[foreign_key] for foreign_key in foreign_keys)
            raise ConfigError(
                f"run.dir={self.root} belongs to another run: {foreign_changes}. "
                "Use the old values to resume it, or another run.dir"
            )
        return list(changed_leaves.values())

    def freeze_recipe(self, config: RunConfig, fingerprints: list[str], ds_config: dict[str, Any]) -> None:
        """Write the resolved recipe, which can be started again as it is. Raises ConfigError if it cannot."""
        try:
            # Known passwords are redacted; there may be others.
            file_mode = 0o600 if config.supervise.exposed else None
            durable.write_file(self.recipe, encode_recipe(config, fingerprints, ds_config), file_mode)
        except OSError as error:
            raise ConfigError(f"{self.recipe} could not be written: {error}") from None

    def lock_run(self) -> None:
        """Keep other training processes out as long as this one lives. Raises ConfigError if there is one."""
        lock_path = self.root / ".lock"
        try:
            self._lock = durable.lock_file(lock_path)
        except OSError as error:
            raise ConfigError(f"{lock_path} cannot be locked: {error}") from None
        if self._lock is None:
            raise ConfigError(
                f"run.dir={self.root}: another process trains here: stop it, or use another run.dir"
            )


def encode_recipe(config: RunConfig, fingerprints: list[str], ds_config: dict[str, Any]) -> bytes:
    """The resolved recipe as recipe.yaml holds it. fingerprints: of the corpora's manifests."""
    recipe_content = {
        "config": config.model_dump(mode="json"), "manifests": fingerprints, "deepspeed_json": ds_config,
    }  # fmt: skip
    return yaml.safe_dump(recipe_content, sort_keys=False).encode()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or broken."""
    try:
        json_value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return json_value if isinstance(json_value, dict) else {}


def _below(key: str, parts: tuple[str, ...]) -> bool:
    return any(key == key_prefix or key.startswith(f"{key_prefix}.") for key_prefix in parts)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for tree_key, tree_value in tree.items():
            yield from _leaves(tree_value, f"{prefix}{tree_key}.")
    else:
        yield prefix.removesuffix("."), tree


def _folded(leaves: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """A section that `others` lacks entirely (None), as one leaf."""
    folded_leaves: dict[str, Any] = {}
    for leaf_key, leaf_value in leaves.items():
        parent_key = next((k for k, v in others.items() if v is None and leaf_key.startswith(f"{k}.")), None)
        if parent_key is None:
            folded_leaves[leaf_key] = leaf_value
        else:
            folded_leaves.setdefault(parent_key, {})[leaf_key.removeprefix(f"{parent_key}.")] = leaf_value
    return folded_leaves


def make_directory(config: RunConfig, recipe: Path) -> RunDirectory:
    """The directory of a run: `run.dir`, or a new one below runs/ named after the recipe. Creates it."""
    try:
        if config.run.dir is not None:
            run_root = config.run.dir
            run_root.mkdir(parents=True, exist_ok=True)
        else:
            run_root = _fresh(Path("runs"), recipe.stem)
        run = RunDirectory(run_root)
        run.steps.mkdir(exist_ok=True)
        run.layers.mkdir(exist_ok=True)
        run.checkpoints.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir or 'runs/'}: the run directory cannot be made: {error}"
        ) from None
    return run


def _fresh(parent: Path, stem: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for run_number in itertools.count(1):
        run_root = parent / f"{stem}-{run_number:03d}"
        with suppress(FileExistsError):
            run_root.mkdir()
            break
    return run_root


class TrackerMemory:
    """What a tracker must know in the next process, which of its runs is ours: RUN/trackers/NAME.json.

    facts: of the last process; empty in the first one, and in a copy of a run directory: it is a run of its own."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.path = root.resolve(), Path("trackers") / f"{name}.json"
        known_facts = read_object(self.root / self.path)
        self.facts: dict[str, Any] = {} if self._copied(known_facts) else known_facts

    def _copied(self, found: dict[str, Any]) -> bool:
        original_root = found.get("directory")
        if not isinstance(original_root, str) or Path(original_root) == self.root:
            return False
        original_path = Path(original_root) / self.path  # gone if the directory was moved
        try:
            return original_path.exists() and not original_path.samefile(self.root / self.path)
        except OSError:
            return False

    def keep_facts(self, **facts: Any) -> None:
        """Add facts. Raises OSError."""
        self.facts |= facts | {"directory": str(self.root)}
        durable.write_file(self.root / self.path, (as_json(self.facts) + "\n").encode())
