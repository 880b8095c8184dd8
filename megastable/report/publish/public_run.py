"""Copies a run directory without what is private: the only source of all that is published.

The copy is itself a run directory: journal.jsonl, recipe.yaml, skips.jsonl, blends.jsonl, summary.json, progress.json
and steps/. Of files that are not named here nothing is copied: logs, checkpoints, traces, trackers' files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from megastable.base import jsonl
from megastable.base.errors import DataError
from megastable.base.text import plural
from megastable.config.recipe import find
from megastable.config.section import seconds_of
from megastable.report.publish.known_words import is_known
from megastable.report.publish.redaction import (
    HASH,
    WITHHELD,
    Keeping,
    PublicNames,
    Redactor,
    apart,
    collect,
)
from megastable.report.run_page.layer_map import NAME as LAYER_FILE
from megastable.report.run_page.record_reader import age
from megastable.run.directory import RunDirectory, as_json, read_object
from megastable.run.events.reading import KINDS
from megastable.run.events.training_events import ConfigChanged
from megastable.run.records import LAYER_SCHEMA, SCHEMA
from megastable.supervise.locks import SUPERVISOR, TRAINING

# Of an event: commands, their arguments, processes, names of files and people, what only a resumed run needs.
NOT_OF_EVENTS = {
    "command", "recipe", "overrides", "given", "module", "pid", "log", "stacks", "evidence", "lineage", "policy", "who",
}  # fmt: skip
BLENDED = ("blend_changed", "mix_changed")  # events whose `old` and `new` have corpora as keys
# Keys of the recipe that hold names, addresses, paths or programs. Any other text that is not megastable's own is left
# out as well.
NOT_OF_RECIPE = {
    "run.dir", "run.name", "deepspeed", "data.validation", "checkpoint.staging", "stability.snapshots.copies.folder",
    "eval.command", "eval.scratch", "logging.project", "logging.tracker_command", "supervise.command",
    "supervise.webhook", "supervise.interface", "supervise.metrics_address", "supervise.metrics_port",
}  # fmt: skip
CURRENCY = re.compile(r"[A-Z]{3}|[€$£¥]")
CORPORA = "corpora"  # where the recipe says that they are


@dataclass
class PublicRun:
    """What became of a run directory. root: of the copy. recipe_without: keys that were left out of the recipe.
    withheld: how many words were left out of texts. corpora: folders, by public name. problems: what could not be
    read."""

    root: Path
    names: PublicNames
    recipe_without: list[str] = field(default_factory=list)
    withheld: int = 0
    corpora: dict[str, Path] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def public_copy(run: Path, root: Path, keep: Keeping) -> PublicRun:
    """Write the copy to `root`, a folder that does not exist yet. Raises DataError if the journal cannot be read."""
    given, made = RunDirectory(run), PublicRun(root, PublicNames(keep))
    root.mkdir(parents=True)
    copy = RunDirectory(root)
    journal, odd = _lines(given.journal)
    events = [e for e in journal if isinstance(e.get("event"), str) and e["event"] in KINDS]
    if odd:
        made.problems.append(f"{given.journal.name}: {plural(odd, 'malformed line')} left out")
    if len(events) < len(journal):
        unknown = plural(len(journal) - len(events), "event")
        made.problems.append(f"{given.journal.name}: {unknown} of an unknown kind left out")
    skips, blends = _lines(given.skips)[0], _lines(given.blends)[0]
    recipe, progress, summary = (
        _recipe(given.recipe, made),
        read_object(given.progress),
        read_object(given.summary),
    )
    _name_corpora(recipe, blends, made)
    for value in (events, skips, blends, progress, summary):
        collect(value, made.names)
    redact = Redactor(made.names)
    _write_lines(copy.journal, (public_event(event, redact) for event in events))
    if skips:
        _write_lines(copy.skips, (redact.tree(line) for line in skips))
    if blends:
        _write_lines(copy.blends, (public_blend(line, redact) for line in blends))
    if recipe:
        content = public_recipe(recipe, redact, made.recipe_without)
        copy.recipe.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    for target, content in ((copy.progress, progress), (copy.summary, summary)):
        if content:
            target.write_text(as_json(public_object(content, redact), indent=1) + "\n", encoding="utf-8")
    _copy_steps(given.steps, copy.steps, made)
    made.withheld = redact.count
    return made


def public_event(event: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    """An event of the journal. It keeps its name."""
    told = public_object({key: value for key, value in event.items() if key != "event"}, redact)
    if event["event"] == ConfigChanged.NAME and isinstance(changes := event.get("changes"), list):
        told["changes"] = [redact.text(public_change(str(change))) for change in changes]
    if event["event"] in BLENDED:
        told |= {key: _by_corpus(event.get(key), redact) for key in ("old", "new") if key in event}
    return {"event": event["event"], **told}


def public_change(change: str) -> str:
    """A change of the recipe, "key: old -> new", without the values of a key that is not published."""
    key = change.partition(":")[0]
    private = {*NOT_OF_RECIPE, "data.corpora"}
    return f"{key}: {WITHHELD}" if any(f"{one}.".startswith(f"{key}.") for one in private) else change


def public_object(value: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    """An object of the run directory, without the keys of `NOT_OF_EVENTS` at any depth."""
    return dict(redact.tree(_without(value)))


def public_blend(line: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    """A line of the data order: corpora by their public names."""
    told = dict(redact.tree({key: value for key, value in line.items() if key != "corpora"}))
    if isinstance(shares := line.get("corpora"), list):
        told["corpora"] = [_share(share, redact) for share in shares if isinstance(share, dict)]
    return told


def public_recipe(content: Mapping[str, Any], redact: Redactor, without: list[str]) -> dict[str, Any]:
    """A frozen recipe. without: gets the keys that were left out although they had a value."""
    config = _section(content.get("config"), "", redact, without)
    logging = config.get("logging")
    if (
        isinstance(logging, dict)
        and "logging.tracker_command" in without
        and isinstance(logging.get("trackers"), list)
    ):
        logging["trackers"] = [name for name in logging["trackers"] if name != "command"]
    manifests = content.get("manifests")
    hashes = (
        [one for one in manifests if isinstance(one, str) and HASH.fullmatch(one)]
        if isinstance(manifests, list)
        else []
    )
    deepspeed = _section(content.get("deepspeed_json"), "deepspeed_json.", redact, without)
    return {"config": config, "manifests": hashes, "deepspeed_json": deepspeed}


def linked(made: PublicRun, run: Path, here: Path) -> None:
    """Link what the pages ask for and the copy does not have: locks (does it run?), checkpoints (are they there?), the
    corpora below `here`, and layer records. `unlinked` removes it."""
    given = RunDirectory(run.resolve())
    for name in (SUPERVISOR, TRAINING, given.checkpoints.name):
        if (given.root / name).exists():
            (made.root / name).symlink_to(given.root / name)
    (here / CORPORA).mkdir(exist_ok=True)
    for name, folder in made.corpora.items():
        with suppress(FileExistsError):
            (here / _corpus_path(name)).symlink_to(folder.resolve())
    _copy_layers(given.layers, RunDirectory(made.root).layers, made)


def unlinked(made: PublicRun) -> None:
    """Leave in the copy what is to be published."""
    copy = RunDirectory(made.root)
    for name in (SUPERVISOR, TRAINING, copy.checkpoints.name):
        (made.root / name).unlink(missing_ok=True)
    for path in copy.layers.glob("*"):
        path.unlink()
    if copy.layers.is_dir():
        copy.layers.rmdir()


# Parts


def _share(share: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    """A corpus of a blend."""
    named = {key: redact.names.of("corpus", str(share[key])) for key in ("name", "path") if key in share}
    return redact.tree(share) | named


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(below) for key, below in value.items() if key not in NOT_OF_EVENTS}
    return [_without(below) for below in value] if isinstance(value, list | tuple) else value


def _by_corpus(value: Any, redact: Redactor) -> dict[str, Any]:
    """Values by corpus."""
    given = value.items() if isinstance(value, dict) else ()
    return apart((redact.names.of("corpus", str(name)), redact.tree(below)) for name, below in given)


def _section(tree: Any, prefix: str, redact: Redactor, without: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        key, path = redact.key(name), f"{prefix}{name}"
        if path == "data.corpora":
            found[key] = (
                [_corpus(one, redact) for one in value if isinstance(one, dict)]
                if isinstance(value, list)
                else []
            )
        elif path in NOT_OF_RECIPE or WITHHELD in key:
            if value not in (None, []):
                without.append(f"{prefix}{key}")
        elif isinstance(value, Mapping):
            found[key] = _section(value, f"{path}.", redact, without)
        elif (path == "supervise.currency" and CURRENCY.fullmatch(str(value))) or (
            path == "checkpoint.interval" and seconds_of(str(value)) is not None
        ):
            found[key] = value
        elif WITHHELD in (told := as_json(redact.tree(value))):
            without.append(path)
        else:
            found[key] = json.loads(told) if isinstance(value, list) else redact.tree(value)
    return found


def _corpus(one: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    rest = redact.tree({key: value for key, value in one.items() if key != "path"})
    return {"path": str(_corpus_path(redact.names.of("corpus", str(one.get("path"))))), **rest}


def _corpus_path(name: str) -> Path:
    return Path(CORPORA) / (re.sub(r"[^\w.-]", "_", name).strip(".") or "corpus")


def _name_corpora(recipe: Mapping[str, Any], blends: Iterable[Mapping[str, Any]], made: PublicRun) -> None:
    """Corpora get their names in the order of the recipe; the order's ledger tells which path has which name."""
    shares = [
        s
        for line in blends
        if isinstance(line.get("corpora"), list)
        for s in line["corpora"]
        if isinstance(s, dict)
    ]
    called = {str(share.get("path")): str(share["name"]) for share in shares if share.get("name")}
    config = recipe.get("config")
    data = config.get("data") if isinstance(config, dict) else None
    corpora = data.get("corpora") if isinstance(data, dict) else None
    paths = (
        [str(one["path"]) for one in corpora if isinstance(one, dict) and one.get("path")]
        if isinstance(corpora, list)
        else []
    )
    for path in dict.fromkeys([*paths, *called]):
        made.names.alias("corpus", path, called.get(path) or Path(path).name or path)
        made.corpora.setdefault(made.names.of("corpus", path), find(path).absolute())


def _recipe(path: Path, made: PublicRun) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        made.problems.append(f"{path.name} cannot be read")
        return {}
    if isinstance(content, dict) and isinstance(content.get("config"), dict):
        return content
    made.problems.append(f"{path.name} is no frozen recipe")
    return {}


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file of lines, and how many lines are none. A torn last line does not count."""
    found, odd = list[dict[str, Any]](), 0
    for line in jsonl.read(path)[0]:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            odd += 1
    return found, odd


def _write_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(as_json(value) + "\n" for value in values)


# Records


def _copy_steps(given: Path, target: Path, made: PublicRun) -> None:
    """All records in one file, in the order in which the run page and others read them: a clock may have been set back
    meanwhile."""
    tables, damaged = list[pa.Table](), 0
    for path in sorted(given.glob("*.parquet"), key=lambda path: age(path.name)):
        try:
            tables.append(pq.read_table(path, schema=SCHEMA))
        except (pa.ArrowException, OSError):
            damaged += 1
    if damaged:
        made.problems.append(f"steps: {plural(damaged, 'file')} of records cannot be read")
    if not tables:
        return
    table = pa.concat_tables(tables)
    first, last = (table.column("step")[n].as_py() for n in (0, len(table) - 1))
    moment = int(table.column("time")[len(table) - 1].as_py() * 1000)
    target.mkdir()
    _write_table(table, target / f"{first:08d}-{last:08d}-{moment}.parquet")


def _copy_layers(given: Path, target: Path, made: PublicRun) -> None:
    """Layer records, with names of layers as megastable gives them."""
    damaged = 0
    target.mkdir()
    for path in sorted(given.glob("*.parquet")):
        if not LAYER_FILE.fullmatch(path.name):
            continue
        try:
            table = pq.read_table(path, schema=LAYER_SCHEMA)
            names = [_layer(str(name), made.names) for name in table.column("name").to_pylist()]
        except (pa.ArrowException, OSError):
            damaged += 1
            continue
        at = table.schema.get_field_index("name")
        _write_table(table.set_column(at, "name", pa.array(names, pa.string())), target / path.name)
    if damaged:
        made.problems.append(f"layers: {plural(damaged, 'file')} of records cannot be read")


def _layer(name: str, names: PublicNames) -> str:
    parts = re.split(r"[._]", name)
    return name if all(part.isdecimal() or is_known(part) for part in parts) else names.of("layer", name)


def _write_table(table: pa.Table, path: Path) -> None:
    try:
        pq.write_table(table, path, compression="zstd", store_schema=False)
    except OSError as error:
        raise DataError(f"{path} could not be written: {error.strerror or error}: make room") from None
