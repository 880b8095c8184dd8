"""The files of an incident that a person opens: incidents/NNNN/ of a run directory, and incidents/index.html.

    python -m megastable.report.postmortem runs/quickstart

Everything is made from the run directory alone, by a process that needs no torch. What stands there already and would
be the same is left alone; a file is whole or not there, and evidence.json, written last, says that the others are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from megastable.config import RunConfig
from megastable.durable import write_file
from megastable.errors import ConfigError, DataError
from megastable.recipe import load
from megastable.report.postmortem import pages, pictures
from megastable.report.postmortem.evidence import Case
from megastable.report.postmortem.facts import Evidence
from megastable.report.postmortem.texts import Library
from megastable.report.summary import latest
from megastable.rundir import RunDirectory, as_json

log = logging.getLogger(__name__)

__all__ = ["incidents_of", "write_incidents"]

EVIDENCE = "evidence.json"


def write_incidents(run: Path, again: int | None = None) -> list[Path]:
    """Write incidents/NNNN/ of every incident whose facts changed, of number `again` in any case, and the index.

    Returns the folders that were written. Raises DataError for a journal that cannot be read, a number that there is
    not, and a disk that refuses, after everything else was written.
    """
    cases, written, refused = list[Evidence](), list[Path](), list[str]()
    for case in _cases(run):
        folder = run / "incidents" / f"{case.incident.number:04d}"
        known = None if case.incident.number == again else _known(folder, case.inputs)
        evidence = known or case.gather()
        cases.append(evidence)
        if known is None:
            try:
                _write(folder, evidence)
                written.append(folder)
            except OSError as error:
                refused.append(f"{folder} could not be written: {error.strerror or error}")
    if again is not None and again not in [e.incident.number for e in cases]:
        raise DataError(f"{run / 'journal.jsonl'} has no incident {again}, but {len(cases)} others")
    try:
        if cases:
            _put(run / "incidents" / "index.html", pages.index(cases).encode())
    except OSError as error:
        refused.append(f"{run / 'incidents' / 'index.html'} could not be written: {error.strerror or error}")
    if refused:
        raise DataError(
            f"{refused[0]}. Nothing is lost, the facts are in the run directory: make room, then run "
            f"python -m megastable.report.postmortem {run}"
        )
    return written


def incidents_of(run: Path) -> Iterator[Evidence]:
    """The facts of every incident, in order. Raises DataError for a journal that cannot be read."""
    return (case.gather() for case in _cases(run))


def _cases(run: Path) -> list[Case]:
    directory, problems = RunDirectory(run), list[str]()
    if not directory.journal.is_file():
        raise DataError(
            f"{directory.journal} does not exist: give the directory of a run, such as runs/quickstart"
        )
    # A line without a time was written by another hand.
    events = [e for e in directory.events() if isinstance(e.get("time"), int | float)]
    config: RunConfig | None = None
    try:
        config = load(directory.recipe)
    except ConfigError as error:
        problems.append(f"the recipe: {error}")

    @cache
    def library() -> Library:
        if config is None:
            raise DataError("without a recipe nobody knows the corpora")
        return Library(config)

    return [Case(directory, config, events, number, library, problems) for number in latest(events)]


def _known(folder: Path, inputs: str) -> Evidence | None:
    """What was written from the same inputs; None where anything else, or nothing whole, is there."""
    try:
        evidence = Evidence.model_validate_json((folder / EVIDENCE).read_bytes())
    except (OSError, ValidationError):
        return None
    return evidence if evidence.inputs == inputs else None


def _write(folder: Path, e: Evidence) -> None:
    """The files of one incident. Raises OSError."""
    drawn = _pictures(e)
    content = dict(drawn)
    if e.samples:
        content["samples.txt"] = pages.samples(e).encode()
    if e.incident.documents:
        content["documents.csv"] = pages.documents(e).encode()
    if e.layers is not None:
        content["layers.csv"] = pages.layers(e).encode()
    content |= {entry.file: entry.text.encode() for entry in e.logs}
    names = ["report.html", "postmortem.md", *content, EVIDENCE]
    content["postmortem.md"] = pages.postmortem(e, names).encode()
    content["report.html"] = pages.report(e, drawn, names).encode()
    content[EVIDENCE] = (as_json(e.model_dump(mode="json"), indent=1) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    # As long as it stands there, the others are taken for whole.
    (folder / EVIDENCE).unlink(missing_ok=True)
    for name, data in content.items():
        _put(folder / name, data)


def _pictures(e: Evidence) -> dict[str, bytes]:
    drawn: dict[str, bytes] = {}
    try:
        if (steps := pictures.steps_picture(e)) is not None:
            drawn["plot.png"] = steps
        if e.tokens is not None:
            drawn["tokens.png"] = pictures.tokens_picture(e.tokens)
    except Exception as error:  # a font, a cache of the library: the words still count
        log.warning("incident %d: no picture: %s", e.incident.number, error)
    return drawn


def _put(path: Path, content: bytes) -> None:
    try:
        if path.read_bytes() == content:
            return
    except OSError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
