"""Copies a run directory without what is private: the only source of all that is published.

The copy is itself a run directory. Of files that are not named here nothing is copied: logs, traces, trackers' files,
post-mortems that were written before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from megastable.base import durable
from megastable.base.errors import MegastableError
from megastable.base.text import count_noun
from megastable.config.recipe import find_recipe, load_recipe
from megastable.config.training import seconds_of
from megastable.data.blends import BlendEntry, read_blends
from megastable.data.skip_ledger import Ledger
from megastable.report.postmortem.sample_texts import PublicView, SampleSource
from megastable.report.publish.redaction import HASH, WITHHELD, Keeping, PublicNames, Redactor, collect_names
from megastable.run.directory import LOADER, RunDirectory, as_json, read_object
from megastable.run.events.reading import KINDS
from megastable.run.events.training_events import ConfigChanged
from megastable.run.record_files import encode_table, name_file, read_files
from megastable.run.records import LAYER_SCHEMA, SCHEMA
from megastable.supervise.locks import SUPERVISOR, TRAINING

# Of any object: commands, their arguments, processes, names of files and people, what only a resumed run needs.
NOT_OF_OBJECTS = {
    "command", "recipe", "overrides", "given", "module", "pid", "log", "stacks", "evidence", "lineage", "policy", "who",
}  # fmt: skip
BLENDED = ("blend_changed", "mix_changed")  # events whose `old` and `new` have corpora as keys
# Keys of the recipe that hold names, addresses, paths or programs. Any other text that is not megastable's own is left
# out as well.
NOT_OF_RECIPE = {
    "run.dir", "run.name", "deepspeed", "data.validation", "checkpoint.staging", "checkpoint.upload",
    "stability.snapshots.copies.folder", "eval.command", "eval.scratch", "logging.project",
    "logging.tracker_command", "supervise.command", "supervise.webhook", "supervise.interface",
    "supervise.metrics_address", "supervise.metrics_port",
}  # fmt: skip
CURRENCY = re.compile(r"[A-Z]{3}|[€$£¥]")


@dataclass
class PublicRun:
    """What became of a run directory. root: of the copy. recipe_without: keys that were left out of the recipe.
    withheld: how many words were left out of texts. problems: what could not be read."""

    root: Path
    names: PublicNames
    recipe_without: list[str] = field(default_factory=list)
    withheld: int = 0
    problems: list[str] = field(default_factory=list)


def public_copy(run: Path, root: Path, keep: Keeping) -> PublicRun:
    """Write the copy to `root`, a new folder. It has links to the locks (does the run go on?) and to the checkpoints
    (are they still there?). Raises DataError if the journal cannot be read, OSError."""
    given, copy, public_run = RunDirectory(run), RunDirectory(root), PublicRun(root, PublicNames(keep))
    root.mkdir(parents=True)
    journal_objects, odd_lines = _lines(given.journal)
    known_events = [e for e in journal_objects if isinstance(e.get("event"), str) and e["event"] in KINDS]
    if left_out := odd_lines + len(journal_objects) - len(known_events):
        left_what = f"{count_noun(left_out, 'line')} left out: malformed, or of an unknown kind"
        public_run.problems.append(f"{given.journal.name}: {left_what}")
    skip_lines, blend_lines = _lines(given.skips)[0], _lines(given.blends)[0]
    object_files = {object_path: read_object(object_path) for object_path in (given.progress, given.summary)}
    recipe_fields = _read_recipe(given.recipe, public_run)
    _name_corpora(recipe_fields, blend_lines, public_run.names)
    collect_names([known_events, skip_lines, blend_lines, *object_files.values()], public_run.names)
    word_redactor = Redactor(public_run.names)
    _write_lines(copy.journal, [public_event(known_event, word_redactor) for known_event in known_events])
    _write_lines(copy.skips, [word_redactor.redact_tree(ledger_line) for ledger_line in skip_lines])
    _write_lines(copy.blends, [word_redactor.redact_tree(ledger_line) for ledger_line in blend_lines])
    for object_path, object_fields in object_files.items():
        _write_lines(
            root / object_path.name, [public_object(object_fields, word_redactor)] if object_fields else []
        )
    if recipe_fields:
        public_fields = public_recipe(recipe_fields, word_redactor, public_run.recipe_without)
        copy.recipe.write_text(yaml.safe_dump(public_fields, sort_keys=False), encoding="utf-8")
    _copy_records(given.steps, copy.steps, SCHEMA, word_redactor, public_run)
    _copy_records(given.layers, copy.layers, LAYER_SCHEMA, word_redactor, public_run)
    for link_name in (SUPERVISOR, TRAINING, given.checkpoints.name):
        if (given.root / link_name).exists():
            (root / link_name).symlink_to((given.root / link_name).resolve())
    public_run.withheld = word_redactor.count
    return public_run


def public_view(run: Path, made: PublicRun) -> PublicView:
    """What post-mortems of the copy show: public names, and, if asked, texts of samples, which the run itself has."""
    source, directory = None, RunDirectory(run)
    if made.names.keep.texts:
        try:
            run_config, skip_ledger = load_recipe(directory.recipe), Ledger.read_ledger(directory.skips, [])
            # The pages are made in another working directory: paths are resolved now.
            config = run_config.model_copy(update={"data": _with_full_paths(run_config.data)})
            lines = read_blends(directory.blends)
            blends = [_with_full_paths(line) if isinstance(line, BlendEntry) else line for line in lines]
            source = SampleSource(config, blends, skip_ledger, directory.skips)
        except (MegastableError, OSError):  # whose message names files
            made.problems.append("the texts of samples: the recipe, the blends or the skips cannot be read")
    return PublicView(Redactor(made.names).redact_text, made.names.name_publicly, source)


def _with_full_paths(given: Any) -> Any:
    """The same with full paths of its corpora; a path stays a text, if it is one."""
    corpora = list[Any]()
    for corpus in given.corpora:
        full_path = type(corpus.path)(find_recipe(corpus.path).absolute())
        corpora.append(corpus.model_copy(update={"path": full_path}))
    return given.model_copy(update={"corpora": corpora})


def public_event(event: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    """An event of the journal. It keeps its name."""
    told = public_object({key: field_value for key, field_value in event.items() if key != "event"}, redact)
    if event["event"] == ConfigChanged.NAME and isinstance(recipe_changes := event.get("changes"), list):
        told["changes"] = [
            redact.redact_text(public_change(str(recipe_change))) for recipe_change in recipe_changes
        ]
    if event["event"] in BLENDED:
        told |= {key: redact.redact_keys("corpus", event.get(key)) for key in ("old", "new") if key in event}
    return {"event": event["event"], **told}


def public_change(change: str) -> str:
    """A change of the recipe, "key: old -> new", without the values of a key that is not published."""
    key = change.partition(":")[0]
    private_keys = {*NOT_OF_RECIPE, "data.corpora"}
    return f"{key}: {WITHHELD}" if any(f"{one}.".startswith(f"{key}.") for one in private_keys) else change


def public_object(value: Mapping[str, Any], redact: Redactor) -> dict[str, Any]:
    """An object of the run directory, without the keys of `NOT_OF_OBJECTS` at any depth."""
    return dict(redact.redact_tree(_without(value)))


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(below) for key, below in value.items() if key not in NOT_OF_OBJECTS}
    return [_without(below) for below in value] if isinstance(value, list | tuple) else value


def public_recipe(content: Mapping[str, Any], redact: Redactor, without: list[str]) -> dict[str, Any]:
    """A frozen recipe. without: gets the keys that were left out although they had a value."""
    config = _section(content.get("config"), "", redact, without)
    logging = config.get("logging")
    if "logging.tracker_command" in without and isinstance(logging, dict):
        logging["trackers"] = [name for name in logging.get("trackers") or [] if name != "command"]
    given = content.get("manifests")
    manifest_hashes = [one for one in given if HASH.fullmatch(str(one))] if isinstance(given, list) else []
    public_json = _section(content.get("deepspeed_json"), "deepspeed_json.", redact, without)
    return {"config": config, "manifests": manifest_hashes, "deepspeed_json": public_json}


def _section(tree: Any, prefix: str, redact: Redactor, without: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section_key, value in tree.items() if isinstance(tree, Mapping) else ():
        public_key, key_path = redact.redact_text(str(section_key)), f"{prefix}{section_key}"
        if key_path == "data.corpora":
            found[public_key] = redact.redact_corpora(value)
        elif key_path in NOT_OF_RECIPE or WITHHELD in public_key:
            if value not in (None, []):
                without.append(f"{prefix}{public_key}")
        elif isinstance(value, Mapping):
            found[public_key] = _section(value, f"{key_path}.", redact, without)
        elif (key_path == "supervise.currency" and CURRENCY.fullmatch(str(value))) or (
            key_path == "checkpoint.interval" and seconds_of(str(value)) is not None
        ):
            found[public_key] = value
        elif WITHHELD in (value_text := as_json(redact.redact_tree(value))):
            without.append(key_path)
        else:
            found[public_key] = (
                json.loads(value_text) if isinstance(value, list) else redact.redact_tree(value)
            )
    return found


def _name_corpora(recipe: Mapping[str, Any], blends: Iterable[Mapping[str, Any]], names: PublicNames) -> None:
    """Corpora get their names in the order of the recipe; the order's ledger tells which path has which name."""
    shares = [share for blend_line in blends for share in _objects(blend_line.get("corpora"))]
    names_by_path = {str(share.get("path")): str(share["name"]) for share in shares if share.get("name")}
    data = recipe.get("config", {}).get("data")
    listed_corpora = _objects(data.get("corpora")) if isinstance(data, dict) else []
    listed_paths = [str(one["path"]) for one in listed_corpora if one.get("path")]
    for path in dict.fromkeys([*listed_paths, *names_by_path]):
        names.add_alias("corpus", path, names_by_path.get(path) or Path(path).name or path)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _read_recipe(path: Path, made: PublicRun) -> dict[str, Any]:
    recipe_content: Any = None
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        recipe_content = yaml.load(path.read_text(encoding="utf-8"), LOADER)
    if isinstance(recipe_content, dict) and isinstance(recipe_content.get("config"), dict):
        return recipe_content
    if path.exists():
        made.problems.append(f"{path.name} cannot be read, or is no frozen recipe")
    return {}


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file of lines, and how many lines are none. A torn last line does not count."""
    lines, line_values = list(filter(bytes.strip, durable.read_lines(path)[0])), list[Any]()
    for file_line in lines:
        with suppress(ValueError, RecursionError):
            line_values.append(json.loads(file_line))
    return _objects(line_values), len(lines) - len(_objects(line_values))


def _write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of lines, if there are any."""
    if values:
        path.write_text("".join(as_json(line_value) + "\n" for line_value in values), encoding="utf-8")


def _copy_records(given: Path, target: Path, schema: pa.Schema, redact: Redactor, made: PublicRun) -> None:
    """Copy the known columns of the record files with a name as the run gives it."""
    target.mkdir()
    read_records = [read for read in read_files(given, schema) if read.file.stamp]
    for file, record_table, *_ in read_records:
        if record_table is None:
            continue
        if "name" in schema.names:
            public_names = map(redact.redact_layer, record_table.column("name").to_pylist())
            layer_names = pa.array(public_names, pa.string())
            record_table = record_table.set_column(schema.get_field_index("name"), "name", layer_names)
        flush_stamps = dict.fromkeys([file.begin, file.stamp])
        (target / name_file(file.low, file.high, *flush_stamps)).write_bytes(encode_table(record_table))
    if damaged_files := sum(read_record.table is None for read_record in read_records):
        made.problems.append(f"{given.name}: {count_noun(damaged_files, 'file')} of records cannot be read")
