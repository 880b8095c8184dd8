"""Writes the incident files for people: incidents/NNNN/ of a run directory, and incidents/index.html.

    python -m megastable.report.postmortem runs/quickstart

Everything is made from the run directory alone, by a process that needs no torch. Unchanged incidents are left alone;
files are written atomically, and evidence.json, written last, marks the others as complete.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from megastable.base.durable import write_file
from megastable.base.errors import DataError
from megastable.report.postmortem import facts, pages, pictures
from megastable.report.postmortem.evidence import Gatherer, Run
from megastable.report.postmortem.expert_facts import collect_loads, has_routers
from megastable.report.postmortem.facts import Cost, Evidence
from megastable.report.postmortem.pages import name_picture
from megastable.report.postmortem.sample_texts import PublicView
from megastable.run.directory import RunDirectory, as_json

log = logging.getLogger(__name__)

__all__ = ["costs_of", "incidents_of", "write_incidents"]

EVIDENCE = "evidence.json"


def write_incidents(run: Path, again: int | None = None, *, public: PublicView | None = None) -> list[Path]:
    """Write incidents/NNNN/ of every incident whose facts changed, of number `again` in any case, and the index.

    public: the view of a published record, if it is for one.

    Returns the folders that were written. Raises DataError for an unreadable journal, an unknown number, a full disk,
    and an incident that cannot be reported, after everything else was written.
    """
    run_facts, told = _open(run, public), list[Evidence]()
    written, refused = list[Path](), list[str]()
    numbers = list(run_facts.journal.own)
    if again is not None and again not in numbers:
        raise DataError(f"{run / 'journal.jsonl'} has no incident {again}, but {len(numbers)} others")
    for number in numbers:
        incident_folder = run / "incidents" / f"{number:04d}"
        try:
            incident_case = Gatherer(run_facts, number)
            known_evidence = None if number == again else _known(incident_folder, incident_case.inputs)
            evidence = known_evidence or incident_case.gather_evidence()
            file_contents = {} if known_evidence else _render(evidence, run)
        except Exception as error:  # whatever is wrong with it: the others are still reported
            log.exception("incident %d", number)
            refused.append(f"incident {number} could not be told: {type(error).__name__}: {error}")
            continue
        told.append(evidence.brief)
        if file_contents and _kept(incident_folder, file_contents, refused):
            written.append(incident_folder)
    if told:
        _kept(run / "incidents", {"index.html": pages.render_index(told).encode()}, refused)
    if refused:
        raise DataError(
            f"{'; '.join(refused[:5])}. Nothing is lost, the facts are in the run directory; once that is mended, run "
            f"python -m megastable.report.postmortem {run}"
        )
    return written


def incidents_of(run: Path) -> Iterator[Evidence]:
    """The facts of every incident, in order. Raises DataError for a journal that cannot be read."""
    run_facts = _open(run)
    return (Gatherer(run_facts, number).gather_evidence() for number in list(run_facts.journal.own))


def costs_of(run: Path) -> dict[int, Cost]:
    """The cost of every incident, by number. Raises DataError for a journal that cannot be read."""
    run_facts = _open(run)
    return {number: Gatherer(run_facts, number).gather_cost() for number in list(run_facts.journal.own)}


def _open(run: Path, public: PublicView | None = None) -> Run:
    journal = RunDirectory(run).journal
    if not journal.is_file():
        raise DataError(f"{journal} does not exist: give the directory of a run, such as runs/quickstart")
    return Run(run, public)


def _known(folder: Path, inputs: str) -> Evidence | None:
    """The evidence written from the same inputs; None if there is none, or it is incomplete."""
    try:
        evidence = Evidence.model_validate_json((folder / EVIDENCE).read_bytes())
    except (OSError, ValidationError):
        return None
    return evidence if evidence.inputs == inputs else None


def _render(e: Evidence, run: Path) -> dict[str, bytes]:
    """The files of one incident, evidence.json last."""
    drawn_pictures = _pictures(e)
    file_contents = dict(drawn_pictures)
    if e.samples:
        file_contents["samples.txt"] = pages.render_samples(e).encode()
    if e.incident.documents:
        file_contents["documents.csv"] = pages.render_documents(e).encode()
    if e.layers is not None:
        file_contents["layers.csv"] = pages.render_layers(e.layers).encode()
    file_contents |= {log_entry.file: facts.copy_log(run, log_entry) for log_entry in e.logs}
    file_names = ["report.html", "postmortem.md", *file_contents, EVIDENCE]
    file_contents["postmortem.md"] = pages.render_postmortem(e, file_names).encode()
    file_contents["report.html"] = pages.render_report(e, drawn_pictures, file_names).encode()
    file_contents[EVIDENCE] = (as_json(e.model_dump(mode="json"), indent=1) + "\n").encode()
    return file_contents


def _kept(folder: Path, content: dict[str, bytes], refused: list[str]) -> bool:
    """Write the files of a folder; write errors are added to `refused`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if EVIDENCE in content:
            # While it exists, the other files count as complete.
            (folder / EVIDENCE).unlink(missing_ok=True)
        for file_name, file_bytes in content.items():
            with suppress(OSError):
                if (folder / file_name).read_bytes() == file_bytes:
                    continue
            write_file(folder / file_name, file_bytes)
    except OSError as error:
        refused.append(f"{folder} could not be written: {error.strerror or error}: make room")
        return False
    return True


def _pictures(e: Evidence) -> dict[str, bytes]:
    drawn: dict[str, bytes] = {}
    try:
        if e.passes:
            drawn["plot.png"] = pictures.draw_steps(e)
        if has_routers(e):
            drawn["routers.png"] = pictures.draw_routers(e)
        if loads := collect_loads(e.layers):
            drawn["loads.png"] = pictures.draw_loads(loads)
        for number, region in enumerate(e.regions, 1):
            if region.probes:
                drawn[name_picture("region", number)] = pictures.draw_region(region, e.run.global_batch or 1)
        for number, branch_trial in enumerate(e.trials, 1):
            drawn[name_picture("branches", number)] = pictures.branches_picture(branch_trial, e.passes)
        if e.tokens is not None:
            drawn["tokens.png"] = pictures.draw_tokens(e.tokens)
    except Exception as error:  # a missing font, a broken cache: the text still counts
        log.warning("incident %d: no picture: %s", e.incident.number, error)
    return drawn
