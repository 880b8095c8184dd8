"""Publishes the record of a run: a folder that can be put online as it is.

Everything in it is made from a public copy of the run directory (public_run.py), which is part of it.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import numpy as np

from megastable.base.errors import DataError
from megastable.base.text import visible
from megastable.report.goodput_picture import goodput_picture
from megastable.report.postmortem import write_incidents
from megastable.report.postmortem.sample_source import PublicView
from megastable.report.publish.leak_check import leaks
from megastable.report.publish.logbook import logbook
from megastable.report.publish.public_run import PublicRun, linked, public_copy, unlinked
from megastable.report.publish.public_view import public_view
from megastable.report.publish.record_facts import (
    RecordFacts,
    checkpoints_of,
    corpora_of,
    evidence_of,
    skips_of,
    software_of,
    spending,
)
from megastable.report.publish.record_folder import RECORD, SUMS, building, put_in_place, write_sums
from megastable.report.publish.record_pages import index_page, readme
from megastable.report.publish.record_pictures import loss_picture
from megastable.report.publish.redaction import Keeping
from megastable.report.run_page.page_file import content, whole
from megastable.report.run_page.page_parts import self_contained
from megastable.report.run_page.run_reader import RunReader
from megastable.run.directory import as_json
from megastable.run.events.reading import read_events
from megastable.run.goodput.time_account import TimeAccount
from megastable.run.goodput.watching import read_account
from megastable.run.run_history import select_standing
from megastable.supervise.status import read_status

COLUMNS = ("step", "time", "loss", "applied", "lr")


@dataclass(frozen=True)
class PublishedRecord:
    """files: sizes in bytes, by name. kept: files of others that were in the folder and still are."""

    folder: Path
    facts: RecordFacts
    files: dict[str, int]
    kept: list[str]


def publish(run: Path, output: Path, keep: Keeping) -> PublishedRecord:
    """Write the record of a run to the folder `output`, whose name it gets; an older record there is replaced.

    Raises DataError if there is no run, if the folder is not a record, or if it cannot be written; then the folder is
    as it was.
    """
    read_status(run)  # raises if there is no run
    output = output.absolute() if not output.is_symlink() else output.resolve()
    output = output.parent.resolve() / output.name
    own, root = output.resolve(), run.resolve()
    if own == root or root in own.parents or own in root.parents:
        raise DataError(
            f"--output {visible(output)}: choose a folder that is not inside or around the run {visible(run)}"
        )
    if not output.name or not output.parent.is_dir():
        raise DataError(f"--output {visible(output)}: there is no directory {visible(output.parent)}")
    try:
        # What it is made of has links to what is private, and is not searched yet: not beside what is online.
        with building(output) as part, TemporaryDirectory(prefix="megastable-record-") as private:
            work = Path(private).resolve()
            made = public_copy(root, work / "run" / output.name, keep)
            linked(made, root, work)
            (site := work / "site").mkdir()
            facts = _written(made, public_view(root, made), work, site)
            if found := leaks(site, _private(made, root, part, work), keep.texts):
                raise DataError(
                    f"nothing was published: a private name would be in {', '.join(found[:5])}. This is a bug of "
                    "megastable, please report it"
                )
            site = Path(shutil.move(site, part / "site"))
            files = write_sums(site)
            return PublishedRecord(output, facts, files, put_in_place(site, output))
    except OSError as error:
        raise DataError(
            f"{visible(output)} could not be written, or {visible(gettempdir())}, where it is made: "
            f"{error.strerror or error}"
        ) from None


def _written(made: PublicRun, view: PublicView, work: Path, site: Path) -> RecordFacts:
    """Write everything but the hashes."""
    problems, root = list(made.problems), made.root.relative_to(work)
    # Pages name the run by the path it is read from: by its name alone.
    with contextlib.chdir(work):
        if (root / "journal.jsonl").exists():
            try:
                write_incidents(root, public=view)
            except DataError as error:
                problems.append(view.text(str(error)))
        reader = whole(root)
        page = self_contained(content([reader], public=True))
        facts, account = _facts(reader, made, problems)
    (site / "run.html").write_text(page, encoding="utf-8")
    if (incidents := made.root / "incidents").is_dir():
        incidents.rename(site / "incidents")
    _pictures(facts, account, reader, site)
    unlinked(made)
    made.root.rename(site / "data")
    names = [path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()]
    names += ["index.html", "README.md", RECORD, SUMS]
    recipe = site / "data" / "recipe.yaml"
    shown = recipe.read_text(encoding="utf-8") if recipe.exists() else ""
    (site / "index.html").write_text(index_page(facts, names, shown), encoding="utf-8")
    (site / "README.md").write_text(readme(facts, names), encoding="utf-8")
    (site / RECORD).write_text(
        as_json(json.loads(as_json(facts.as_object())), indent=1) + "\n", encoding="utf-8"
    )
    return facts


def _facts(reader: RunReader, made: PublicRun, problems: list[str]) -> tuple[RecordFacts, TimeAccount | None]:
    head, run = reader.head(), reader.root
    events, incidents = list(read_events(reader.run.journal)), evidence_of(run)
    account = None
    with contextlib.suppress(DataError):
        account = read_account(run, bool(reader.status.supervisor.alive or reader.status.trainer.alive))[0]
    starts, recipe = reader.history.starts, reader.recipe.get("supervise", {})
    price = recipe.get("gpu_hour_price")
    skips = skips_of(reader, problems)
    return RecordFacts(
        name=made.root.name, made=time.time(), head=head, model=reader.recipe.get("model", {}), starts=starts,
        software=software_of(starts), corpora=corpora_of(made, reader), skips=skips, goodput=reader.account,
        spending=spending(
            account, starts, price if isinstance(price, int | float) else None, str(recipe.get("currency", "USD"))
        ),
        checkpoints=checkpoints_of(reader), incidents=incidents,
        days=logbook(events, incidents, _steps(reader), select_standing(reader.history.evaluations)),
        made_from=made, problems=list(dict.fromkeys([*problems, *head["problems"]])),
    ), account  # fmt: skip


def _steps(reader: RunReader) -> dict[str, Any]:
    """Columns of the steps that were not undone."""
    with reader.records.table() as table:
        live = np.flatnonzero(~table.steps["undone"])
        return {name: table.steps[name][live] for name in COLUMNS}


def _pictures(facts: RecordFacts, account: TimeAccount | None, reader: RunReader, site: Path) -> None:
    evaluations = [(one.step, one.loss) for one in select_standing(reader.history.evaluations)]
    marks = [(e.incident.number, e.incident.onset or e.incident.step) for e in facts.incidents]
    loss_picture(_steps(reader), marks, evaluations, site / "loss.png")
    if account is not None and account.wall:
        goodput_picture(account, facts.name, site / "goodput.png")


def _private(made: PublicRun, *paths: Path) -> list[str]:
    """Names that must not be in any file: paths, names that were replaced, and those of this machine."""
    keep, names = made.names.keep, made.names.of_kind
    found = [*map(str, paths), str(Path.home()), socket.gethostname()]
    with contextlib.suppress(OSError, KeyError):
        found.append(getpass.getuser())
    found += [] if keep.hosts else [*names.get("host", {}), *made.names.alike]
    found += [] if keep.names else [*names.get("corpus", {}), *names.get("shard", {})]
    # The folder's name, and names that are kept, were chosen for the public, whatever they are made of.
    public = {public for known in names.values() for public in known.values()} | {made.root.name}
    return [name for name in found if not any(name in one for one in public)]
