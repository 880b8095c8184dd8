"""Renders the files of an incident: post-mortem, report, index, samples, tables. Pure but for reading the templates.

All output of a template goes through `finalize`, which makes untrusted text visible, and harmless in the file's own
language, without the template's help. Only text made by this module passes unchanged.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar
from urllib.parse import quote

from jinja2 import Environment
from markupsafe import Markup, escape

from megastable.base.text import count_noun, make_visible, show_duration, show_ranges
from megastable.report import safe
from megastable.report.postmortem import sentences
from megastable.report.postmortem.expert_facts import collect_loads, describe_loads
from megastable.report.postmortem.facts import Evidence, Layers, LayerValue
from megastable.report.postmortem.sample_texts import DocumentText, count_positions
from megastable.report.postmortem.trial_facts import EXPLANATION, BranchFacts

ON_PAGE = 5  # samples shown on the page
DOCUMENTS = 50  # documents shown on the page
SUSPECTS = 16  # suspects shown on either page
CHANGED = 12  # layer statistics shown on the page
FILES = {
    "report.html": "all of it on one page",
    "postmortem.md": "the same for a terminal or a wiki",
    "plot.png": "loss and gradient norm around it",
    "region.png": "where the bad region's ends were looked for",
    "branches.png": "the losses of the branches that were tried, and of the run",
    "tokens.png": "token histogram of the bad samples beside the corpus's",
    "samples.txt": "the texts, escaped",
    "documents.csv": "the documents of the bad samples",
    "routers.png": "loads of experts and scores of routers around it",
    "loads.png": "load of every expert before, during and after it",
    "layers.csv": "statistics of every layer before, during and after it",
    "evidence.json": "everything, for machines",
}

T = TypeVar("T")


class Raw(str):
    """Text of Markdown that is escaped already."""


def render_report(e: Evidence, pictures: Mapping[str, bytes], files: Sequence[str]) -> str:
    """report.html: a self-contained page. pictures: PNG by file name; files: that exist."""
    data = {
        picture_name: Markup("data:image/png;base64,") + base64.b64encode(png).decode()
        for picture_name, png in pictures.items()
    }
    return _html().get_template("report.html.jinja").render(
        **_facts(e), pictures=data, files=_files(files), mood=sentences.name_mood(e.incident.outcome),
        shown=e.samples[:ON_PAGE], figures=sentences.list_figures(e), most_documents=DOCUMENTS,
        changed=list_changed(e), place=_place, scientific=lambda value: "" if value is None else f"{value:.3g}",
    )  # fmt: skip


def render_postmortem(e: Evidence, files: Sequence[str]) -> str:
    """postmortem.md."""
    example_text = "".join(text_piece.text for text_piece in e.samples[0].pieces)[:600] if e.samples else ""
    return _markdown().get_template("postmortem.md.jinja").render(
        **_facts(e), files=_files(files), has_plot="plot.png" in files, drawn=files, example=example_text,
        duration=show_duration,
    )  # fmt: skip


def render_index(cases: Sequence[Evidence]) -> str:
    """index.html of a run's incidents, at least one."""
    lost_steps, opened = sum(e.cost.steps for e in cases), sum(e.incident.outcome != "healed" for e in cases)
    told = f"{count_noun(len(cases), 'incident')}, {count_noun(lost_steps, 'step')} lost"
    told += f"; {opened} not proven to be over." if opened else "; all of them are over."
    return _html().get_template("index.html.jinja").render(
        run=cases[-1].run, cases=cases, headline=told, mood=sentences.name_mood, story=sentences.write_headline
    )  # fmt: skip


def render_samples(e: Evidence) -> str:
    """samples.txt: every text whole, indented, so that none can pass for a heading."""
    i = e.incident
    sample_count, sample_kind = count_positions(i.shown), sentences.what_of(i).capitalize()
    first = f"{sample_kind} samples of incident {i.number}: {len(e.samples)} of {sample_count:,}. "
    lines = [first + "Characters that do not show are escaped."]
    for sample in e.samples:
        loss = (
            "" if sample.loss is None else f", loss {sentences.format_number(sample.loss)} on the good state"
        )
        lines += ["", f"== position {sample.position}, corpus {make_visible(sample.corpus)}{loss}"]
        for text_piece in sample.pieces:
            lines.append(f"-- {make_visible(_place(text_piece))}" + ("" if text_piece.ends else " (goes on)"))
            lines += [f"    {text_line}" for text_line in safe.show_block(text_piece.text).split("\n")]
    return "\n".join(lines) + "\n"


def render_documents(e: Evidence) -> str:
    """documents.csv."""
    document_rows = [(d.corpus, d.shard, d.document, d.first_token, d.tokens) for d in e.incident.documents]
    return safe.write_csv(("corpus", "shard", "document", "first_token", "tokens"), document_rows)


def render_layers(found: Layers) -> str:
    """layers.csv: every statistic before, during and after the incident."""
    looks = {"before": found.before_step, "during": found.during_step, "after": found.after_step}
    head = [look if look_step is None else f"{look} (step {look_step})" for look, look_step in looks.items()]
    rows = [(v.name, v.statistic, v.before, v.during, v.after, v.ratio) for v in found.values]
    return safe.write_csv(("name", "statistic", *head, "ratio"), rows)


def list_changed(e: Evidence) -> list[LayerValue]:
    """The layer statistics that changed most, infinite ones first."""

    def change(value: LayerValue) -> float:
        value_ratio = value.ratio
        if value_ratio is None:
            return 0.0
        return abs(math.log(value_ratio)) if 0 < value_ratio < math.inf else math.inf

    return sorted(e.layers.values if e.layers else [], key=change, reverse=True)[:CHANGED]


def _facts(e: Evidence) -> dict[str, Any]:
    """The content of both pages."""
    return {
        "e": e, "headline": sentences.describe_symptom(e.incident), "sequel": sentences.write_sequel(e),
        "outcome": sentences.describe_outcome(e),
        "most_suspects": SUSPECTS,
        "tokens": e.tokens, "skipped": sentences.list_skipped(e),
        "type_of": sentences.type_of, "type_remark": sentences.type_remark(e.incident),
        "cause": sentences.describe_cause(e.incident),
        "actions": [sentences.describe_action(a) for a in e.incident.actions],
        "peak": lambda value: sentences.format_peak(e.incident, value),
        "follow_ups": sentences.follow_ups(e), "cost_explained": sentences.cost_explained(e),
        "number": sentences.format_number,
        "ranges": show_ranges, "positions": count_positions(e.incident.positions),
        "texts": count_positions(e.incident.shown),
        "what": sentences.what_of(e.incident), "put_off": sentences.describe_deferral(e),
        "later": sentences.later_losses(e),
        "layers_remark": _layers_remark(e.layers), "loads_remark": describe_loads(collect_loads(e.layers)),
        "regions": _with_pictures("region", e.regions), "trials": _with_pictures("branches", e.trials),
        "difference": _difference, "explanation": EXPLANATION,
        "loss": lambda value: "–" if value is None else f"{value:.3f}" if math.isfinite(value) else "not finite",
        "uniform": math.log(e.tokens.vocabulary) if e.tokens else 0.0,
    }  # fmt: skip


def name_picture(kind: str, number: int) -> str:
    """The file name of a picture. number: of its kind in the incident, from 1."""
    return f"{kind}.png" if number == 1 else f"{kind}-{number}.png"


def _with_pictures(kind: str, items: Sequence[T]) -> list[tuple[str, T]]:
    """Each with the name of its picture."""
    return [(name_picture(kind, picture_number), item) for picture_number, item in enumerate(items, 1)]


def _difference(branch: BranchFacts) -> str:
    """To the control, with its standard error."""
    if branch.difference is None or math.isnan(branch.difference):
        return "–"
    if branch.is_control:
        return "0, the control"
    if not math.isfinite(branch.difference):
        return "not finite"
    error_text = "" if branch.error is None or not math.isfinite(branch.error) else f" ± {branch.error:.3f}"
    return f"{branch.difference:+.3f}{error_text}"


def _layers_remark(layers: Layers | None) -> str:
    if layers is None:
        return ""
    look_steps = [(layers.before_step, "before the onset"), (layers.during_step, "in the middle of it")]
    look_steps += [(layers.after_step, "when it was over")]
    look_texts = [f"step {step:,}, {look_name}" for step, look_name in look_steps if step is not None]
    return f"Looks into the layers: {'; '.join(look_texts)}."


def _files(names: Sequence[str]) -> list[tuple[str, str]]:
    further = {
        "region-": "where the ends of a further bad region were looked for",
        "branches-": "the losses of the branches of a further trial",
    }
    known = FILES | {
        name: remark for name in names for kind, remark in further.items() if name.startswith(kind)
    }
    return [(name, known.get(name, "a log, or the stacks of a rank")) for name in names]


def _place(piece: DocumentText) -> str:
    return "a document" if piece.document is None else f"document {piece.document} of {piece.shard}"


# The two languages


@cache
def _html() -> Environment:
    environment = _add_filters(safe.html_environment("megastable.report.postmortem"))
    style_sheet = environment.loader.get_source(environment, "style.css")[0]  # type: ignore[union-attr]
    environment.globals["style"] = Markup(style_sheet)
    environment.filters["text"] = _text
    return environment


@cache
def _markdown() -> Environment:
    def finalize(value: Any) -> Any:
        return safe.escape_markdown(value) if isinstance(value, str) and not isinstance(value, Raw) else value

    environment = _add_filters(safe.template_environment("megastable.report.postmortem", finalize=finalize))
    environment.filters |= {
        "fenced": lambda text: Raw(safe.fence_text(text)), "code": lambda text: Raw(safe.quote_code(text)),
    }  # fmt: skip
    return environment


def _add_filters(environment: Environment) -> Environment:
    environment.filters |= {
        "sentence": lambda text: text[:1].upper() + text[1:], "path": lambda name: Raw(quote(name)),
    }  # fmt: skip
    return environment


def _text(text: str) -> Markup:
    """Untrusted text for a `pre`, its escapes set apart."""
    text_pieces = safe.split_escapes(safe.show_block(text))
    return Markup("").join(
        Markup('<span class="esc">{}</span>').format(text_piece) if is_escape else escape(text_piece)
        for text_piece, is_escape in text_pieces
    )
