"""Renders the record of a run: index.html for a browser, README.md for where Markdown is shown."""

from __future__ import annotations

import fnmatch
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from megastable import __version__
from megastable.base.text import duration, size
from megastable.report.postmortem import safe
from megastable.report.publish.logbook import cost_in_words
from megastable.report.publish.record_facts import SKIPS, RecordFacts
from megastable.report.publish.record_folder import CHECK
from megastable.report.templates import template_environment

# What is in the folder, as far as it is there.
FILES = {
    "run.html": "the whole run on one page: every curve, incident and second",
    "incidents/index.html": "the post-mortems of all incidents",
    "data/journal.jsonl": "every event, in order, with its reason",
    "data/recipe.yaml": "the configuration, resolved",
    "data/steps/*": "measurements of every step (Parquet)",
    "data/skips.jsonl": "the skip ledger: data that is left out, and why",
    "data/blends.jsonl": "the order of the data: corpora and their weights",
    "data/summary.json": "the figures of the finished run",
    "record.json": "this page, for programs",
    "SHA256SUMS": "hashes of all files",
}


class _Plain(str):
    """Markdown that is not escaped again."""


def index_page(facts: RecordFacts, files: list[str], recipe: str) -> str:
    """index.html. files: of the folder; recipe: the text of data/recipe.yaml, "" if there is none."""
    environment = _environment(autoescape=True, finalize=_visible)
    style, _, _ = PackageLoader("megastable.report.postmortem").get_source(environment, "style.css")
    return environment.get_template("index.html.jinja").render(
        style=Markup(style), recipe=recipe, **_content(facts, files)
    )


def readme(facts: RecordFacts, files: list[str]) -> str:
    """README.md."""
    environment = _environment(autoescape=False, finalize=_escaped)
    # `path`: of the record's own files, which have nothing to escape.
    environment.filters |= {"code": lambda text: _Plain(safe.code(text)), "path": _Plain}
    return environment.get_template("README.md.jinja").render(**_content(facts, files))


def _content(facts: RecordFacts, files: list[str]) -> dict[str, Any]:
    lost = (facts.goodput or {}).get("lost", [])
    shown = [(name, what) for pattern, what in FILES.items() for name in fnmatch.filter(files, pattern)]
    return {
        "f": facts, "files": shown,
        "pictures": [name for name in ("loss.png", "goodput.png") if name in files],
        "version": __version__, "check": CHECK, "software": facts.software, "lost": lost[:12],
        "skips": facts.skips[-SKIPS:], "keep": facts.made_from.names.keep,
        "withheld": facts.made_from.recipe_without, "costs": [(e, cost_in_words(e)) for e in facts.incidents],
        "seconds": sorted((facts.goodput or {}).get("seconds", {}).items(), key=lambda entry: -entry[1]),
    }  # fmt: skip


def _environment(**options: Any) -> Environment:
    environment = template_environment("megastable.report.publish", **options)
    environment.filters |= {
        "duration": duration, "size": size, "share": lambda value: f"{value:.1%}",
        "moment": lambda time: datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip
    return environment


def _visible(value: Any) -> Any:
    return safe.block(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _escaped(value: Any) -> Any:
    return safe.markdown(value) if isinstance(value, str) and not isinstance(value, _Plain) else value
