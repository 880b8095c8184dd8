"""Prints the summary of a finished run: its incidents in a few lines each, its losses, its files.

python -m megastable.report.story runs/quickstart
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megastable.base.errors import DataError, user_errors
from megastable.base.text import describe_deferral, make_visible, show_duration, show_number, show_ranges
from megastable.config.recipe import find_recipe, load_recipe
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.plant import read_planted
from megastable.data.tokenizer import load_tokenizer
from megastable.model.sizes import describe_active
from megastable.report.postmortem import costs_of, sentences
from megastable.report.postmortem.facts import Cost, IncidentFacts
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import LookedAhead
from megastable.run.events.stability_events import Would

CLEAN = Path("data/stdlib")
NAMED = 5  # documents


def text_at(path: Path, position: int, config: RunConfig) -> str:
    """The start of the text at a position of a corpus, on one line."""
    corpus_config = config.data.corpora[0].model_copy(update={"path": path})
    opened_corpora = open_corpora([corpus_config], config.model.sequence_length, config.run.seed)
    info = opened_corpora.manifests[0].tokenizer
    tokenizer = load_tokenizer(find_recipe(path) / info.file, info.eod)
    decoded_text = tokenizer.decode(opened_corpora.train.read_sample(position)[1:25])
    return make_visible(" ".join(decoded_text.split()))[:36]


def tell_incident(incident: dict[str, Any], config: RunConfig, cost: Cost | None = None) -> Iterator[str]:
    """An incident of summary.json in a few lines: seen, bad, an example, done, cost."""
    i = IncidentFacts.model_validate({"number": 0, "kind": incident["class"], **incident})
    symptom = make_visible(sentences.name_symptom(i), 300)
    yield f"step {i.onset:<7} {symptom}; {make_visible(i.kind)}, cause: {make_visible(i.cause)}"
    if i.bad:
        found, planted = (
            {(d["corpus"], d["shard"], d["document"]) for d in incident[document_key] or ()}
            for document_key in ("documents", "planted_documents")
        )
        named = sorted(d[2] for d in found)
        more_text = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        first_named = ", ".join(map(str, named[:NAMED]))
        bad_line = f"bad          samples {show_ranges(i.bad, 4)}: documents {first_named}{more_text}"
        if planted:
            same_count, other_count = len(found & planted), len(found - planted)
            others_text = f"; {same_count} of the {len(planted)} planted ones, {other_count} others"
            bad_line += ", exactly the planted ones" if found == planted else others_text
        yield bad_line
        path, first_position = config.data.corpora[0].path, i.bad[0][0]
        if read_planted(find_recipe(path)) and CLEAN.exists():
            bad_text, clean_text = (text_at(corpus, first_position, config) for corpus in (path, CLEAN))
            yield f"for example  {bad_text!r} instead of {clean_text!r}"
    done_text = "nothing"
    if incident["action"]:
        action_name = str(incident["action"])
        done_text = sentences.ACTIONS.get(action_name, make_visible(action_name))
        if i.positions:
            done_text += "; skipped " + ("those samples" if i.bad else show_ranges(i.positions, 4))
        if deferral_text := describe_deferral(i.deferred, i.returns, i.lost):
            done_text += f"; {deferral_text}"
    yield f"done         {done_text}: {make_visible(i.outcome)}"
    time_text = f", time lost: {show_duration(cost.seconds)}" if cost is not None else ""
    yield f"cost         steps lost: {i.steps_lost}, updates refused: {i.batches_discarded}{time_text}"


def _instead(run: Path, config: RunConfig) -> Iterator[str]:
    """The text if there was no incident: nothing happened, or detection was off."""
    if not config.stability.enabled:
        yield "stability.enabled=false: spike detection was off."
    elif config.stability.dry_run:
        for would_event in RunDirectory(run).iterate_events(Would):
            yield f"step {would_event['step']:<7} would {would_event['action']}: {would_event['reason']}"
        yield "stability.dry_run=true: nothing was done."
    else:
        for event in RunDirectory(run).iterate_events(LookedAhead):
            yield f"ahead        {event.format_sentence()}"
        yield "No incident."


def print_story(run: Path) -> None:
    """Print the story of the finished run `run`."""
    try:
        s = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run / 'summary.json'}: {error}: it is written when a run is complete; {run / 'journal.jsonl'} tells "
            "what happened so far"
        ) from None
    run_config = load_recipe(run / "recipe.yaml")
    corpus_path = run_config.data.corpora[0].path
    validation = "none (train.eval_samples=0, or no validation split)"
    if s["val_loss"] is not None:
        validation = f"{s['val_loss']:.3f}"
        if s["val_unigram_entropy"] is not None:
            validation += f"; unigram entropy {s['val_unigram_entropy']:.3f}"
    print(
        f"\n{s['parameters'] / 1e6:.1f}M parameters{describe_active(run_config.model)}, {s['steps']} steps, "
        f"{s['tokens'] / 1e6:.2f}M tokens at "
        f"{s['tokens_per_second']:,.0f} a second on average, on {s['world_size']} processes with ZeRO "
        f"{s['zero_stage']}\n"
    )
    if planted_samples := read_planted(find_recipe(corpus_path)):
        met_text = "" if s["cursor"] > planted_samples.first else "; the run ended before them"
        print(f"{corpus_path} has {planted_samples}{met_text}.")
    incident_costs = costs_of(run) if s["incidents"] and RunDirectory(run).journal.exists() else {}
    for incident in s["incidents"]:
        print(*tell_incident(incident, run_config, incident_costs.get(incident.get("number"))), sep="\n")
    if not s["incidents"]:
        print("\n".join(_instead(run, run_config)))
    report_paths = sorted(RunDirectory(run).incidents.glob("*/report.html"))
    file_remarks = dict.fromkeys(map(str, report_paths[-3:]), "an incident, on one page for a browser") | {
        f"{run}/summary.json": "these figures and more",
        f"{run}/journal.jsonl": "every event, in order, with its reason",
        f"{run}/steps/": "every step's measurements (Parquet)",
        f"{run}/checkpoints/": "what a run resumes from",
        f"{run}/recipe.yaml": "the configuration, resolved",
        f"{corpus_path}/": "the corpus and its tokenizer",
    }
    name_width = max(map(len, file_remarks))
    print(
        f"\ntraining loss    {show_number(s['first_loss'])} -> {show_number(s['final_loss'])} nats per token "
        f"(mean of the last 20 steps)\nvalidation loss  {validation}\n"
    )
    print(
        *(f"{remark_name:<{name_width}}  {remark}" for remark_name, remark in file_remarks.items()), sep="\n"
    )
    programs = os.path.relpath(Path(sys.executable).parent)  # where this environment has its commands
    print(
        f"\nThe run:   {programs}/megastable watch {run}   then open http://localhost:8765\n"
        f"Curves:    {programs}/tensorboard --logdir {run}/tensorboard   then open http://localhost:6006\n"
        f"Decisions: {programs}/megastable backtest {run} --plot {run}/decisions.png"
    )
    if any(i.get("cause") == "data" for i in s["incidents"]):
        print(f"The data:  {programs}/megastable inspect incident {run} 1 --html incident.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m megastable.report.story", description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a finished run")
    with user_errors():
        print_story(parser.parse_args().run)
