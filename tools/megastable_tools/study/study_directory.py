"""The directory of a study: what it is a study of, and the results so far. It can be killed at any time and goes on.

    with StudyDirectory.open_locked(folder, identity, TrialResult) as study:
        results = run_missing(study, recipe, trials, jobs, watch)

`study.json` says what the results belong to, `trials/NAME.json` is a result, `runs/` has the unfinished runs, and a
lock keeps a second process out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rich.table import Table

from megastable.base import durable
from megastable.base.errors import ConfigError, DataError
from megastable.base.text import count_noun
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable_tools.study.trial import SavedResult, Trial, TrialResult, run_trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
SHOWN = 5  # differences named in a refusal


R = TypeVar("R", bound=SavedResult)


class StudyDirectory(Generic[R]):
    """results: by the run's name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity, self.trials, self.runs = root / "study.json", root / "trials", root / "runs"
        self.results: dict[str, R] = {}

    @classmethod
    @contextmanager
    def open_locked(cls, root: Path, identity: Mapping[str, Any], kind: type[R]) -> Iterator[Self]:
        """Lock it, making it if need be, and read its results. Raises ConfigError if it is another study's, or another
        process works in it."""
        study = cls(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not study.identity.exists() and any(
                not folder_entry.name.startswith(".") for folder_entry in root.iterdir()
            ):
                raise ConfigError(
                    f"{root} is not the directory of a study, nor empty: choose another --output"
                )
            study_lock = durable.lock_file(root / ".lock")
        except OSError as error:
            raise ConfigError(f"{root} cannot be used: {error}: choose another --output") from None
        if study_lock is None:
            raise ConfigError(
                f"{root}: another process works on this study: wait for it, or choose another --output"
            )
        with study_lock:
            study._claim(identity)
            for result_path in sorted(study.trials.glob("*.json")):
                study.results[result_path.stem] = kind.load_file(result_path)
            yield study

    def _claim(self, identity: Mapping[str, Any]) -> None:
        own_identity: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **identity}, default=str))
        if self.identity.exists():
            try:
                identity_found = json.loads(self.identity.read_text())
                assert isinstance(identity_found, dict)
            except (OSError, ValueError, AssertionError):
                raise DataError(f"{self.identity}: not a study's: choose another --output") from None
            if told := list_differences(identity_found, own_identity):
                more_text = f" and {count_noun(len(told) - SHOWN, 'more')}" if len(told) > SHOWN else ""
                raise ConfigError(
                    f"{self.root} holds another study: {'; '.join(told[:SHOWN])}{more_text}. "
                    "Say the same as then to go on, or choose another --output"
                )
        try:
            durable.write_file(self.identity, (json.dumps(own_identity, indent=1) + "\n").encode())
            self.trials.mkdir(exist_ok=True)
        except OSError as error:
            raise DataError(f"{self.root} could not be written to: {error}") from None

    def list_missing(self, names: Iterable[str]) -> list[str]:
        """Those without a result yet, each once."""
        return [name for name in dict.fromkeys(names) if name not in self.results]

    def keep_result(self, name: str, result: R) -> None:
        """Raises DataError if it cannot be written."""
        result.save_file(self.trials / f"{name}.json")
        self.results[name] = result


@dataclass(frozen=True)
class StudyReport:
    """What a study has found. facts: for JSON; table, sentences: for people; draw: into a figure of this size, width
    and height in inches."""

    facts: dict[str, Any]
    table: Table
    sentences: list[str]
    draw: Callable[[Figure], None]
    size: tuple[float, float]


def run_missing(
    study: StudyDirectory[TrialResult], recipe: Path, trials: Sequence[Trial], jobs: int,
    watch: Callable[[str, TrialResult], None],
) -> dict[str, TrialResult]:  # fmt: skip
    """Run those of `trials` that are missing, and return the results of all. watch: told of each that is done."""
    by_name = {trial.name: trial for trial in trials}

    def done(trial: Trial, result: TrialResult) -> None:
        study.keep_result(trial.name, result)
        watch(trial.name, result)

    run_trials(recipe, [by_name[name] for name in study.list_missing(by_name)], study.runs, jobs, done)
    return {name: study.results[name] for name in by_name}


def identity_of(
    kind: str, config: RunConfig, grid: Mapping[str, Sequence[Any] | Mapping[str, Any]]
) -> dict[str, Any]:
    """What the results of a study depend on: its kind, its recipe without what the trials vary, its corpora's contents,
    and the grid of trials, of which a study may get more, but not other ones. Raises DataError for a corpus that cannot
    be read."""
    c = config
    corpora = open_corpora(c.data.corpora, c.model.sequence_length, c.run.seed, [], c.data.validation)
    recipe_tree = config.model_dump(mode="json", exclude={"run": {"dir", "seed"}})
    own = {"validation": corpora.held_out.names[0]} if c.data.validation else {}
    return {"kind": kind, "recipe": recipe_tree, "corpora": corpora.fingerprints, **own, "grid": dict(grid)}


def list_differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What keeps a study of identity `new` out of the directory of `old`, as "key: old -> new"."""
    differences_told: list[str] = []
    for identity_key in dict.fromkeys([*old, *new]):
        was, new_value, key_name = old.get(identity_key), new.get(identity_key), f"{prefix}{identity_key}"
        if was == new_value:
            continue
        if isinstance(was, dict) and isinstance(new_value, dict):
            if prefix.startswith("grid."):
                was = {
                    inner_key: inner_value
                    for inner_key, inner_value in was.items()
                    if new_value.get(inner_key) != inner_value
                }  # more of them is no other study
                new_value = {inner_key: new_value.get(inner_key) for inner_key in was}
            differences_told += list_differences(was, new_value, f"{key_name}.")
        elif prefix == "grid." and isinstance(was, list) and isinstance(new_value, list):
            if gone := [value for value in was if value not in new_value]:
                differences_told.append(
                    f"{key_name}: {', '.join(map(str, gone))} belong to it, and not to this one"
                )
        else:
            differences_told.append(f"{key_name}: {was} -> {new_value}")
    return differences_told
