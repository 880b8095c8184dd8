"""The files of an incident: whole, true to the run directory, harmless whatever the texts say, made of what is left."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from megastable.base.errors import DataError
from megastable.config.recipe import load_recipe
from megastable.data.corpora import open_corpora
from megastable.data.samples import Document
from megastable.data.skip_ledger import SkipEntry, append_entries, append_entry, read_ledger, sample_entries
from megastable.report import postmortem
from megastable.report.postmortem import (
    incidents_of,
    pages,
    pictures,
    sample_texts,
    sentences,
    write_incidents,
)
from megastable.report.postmortem.__main__ import app
from megastable.report.postmortem.evidence import split_passes
from megastable.report.postmortem.expert_facts import collect_loads, has_routers
from megastable.report.postmortem.facts import Evidence, Log, StepRow
from megastable.run.directory import RunDirectory
from megastable.run.records import LAYER_SCHEMA, LayerRecord, Recorder
from megastable_guard.incident import Incident
from tests.conftest import LENGTH
from tests.full_disk import files_no_larger_than
from tests.report.runs import (
    NASTY,
    SPIKE,
    Make,
    breakdown,
    data_incident,
    make_run,
    note,
    remedies_tried,
    step_record,
    suspects_tried,
    tell,
)
from tests.report.test_safe import HOSTILE
from tests.tiers import examples

REGION: dict[str, Any] = {
    "first": 236, "end": 248, "how": "it ends at position 247", "measured": 56, "steps": 2.3,
    "probes": [[240, 8, 8], [232, 8, 4], [256, 8, 0], [248, 8, 0], [400, 8, 1], [800, 8, 0]],
}  # fmt: skip


def texts_of(folder: Path) -> tuple[str, str]:
    return (folder / "report.html").read_text(), (folder / "postmortem.md").read_text()


def read_back(folder: Path) -> Evidence:
    """The evidence for machines."""
    return Evidence.model_validate_json((folder / "evidence.json").read_bytes())


# What is there


def test_report_shows_how_far_bad_data_goes(make: Make, hostile_corpus: Path) -> None:
    run = make()
    tell(RunDirectory(run), data_incident(hostile_corpus, [(236, 248)]), region=REGION)
    (folder,) = write_incidents(run)
    (evidence,) = incidents_of(run)
    told = [(s.first, s.end, s.batches, s.measured, s.bad) for s in evidence.regions[0].stretches]
    assert told == [(232, 248, 2, 16, 12), (248, 264, 2, 16, 0), (400, 408, 1, 8, 1), (800, 808, 1, 8, 0)]
    page, text = texts_of(folder)
    assert page.count("data:image/png") == 3 and "It ends at position 247." in page
    assert (
        '<td class="n">232 to 247</td><td class="n">2</td><td class="n">16</td><td class="n">12</td>' in page
    )
    assert (
        "| 232 to 247 | 2 | 16 | 12 |" in text
        and "](region.png)" in text
        and "in 2.3 steps of time.\n" in text
    )
    assert read_back(folder) == evidence and evidence.problems == []


def with_trials(run: Path, *trials: dict[str, Any], cause: str = "data", **change: Any) -> Path:
    """The run, in which trials were held between the opening of an incident and its cause."""
    directory = RunDirectory(run)
    number = {"number": 1, "summary": Incident(number=1, **SPIKE, **change).model_dump(mode="json")}
    note(directory, 1030.5, "incident", what="opened", step=31, onset=30, **number)
    for trial in trials:
        note(directory, 1030.6, "branches_tried", **trial)
    note(directory, 1030.6, "incident", what="attributed", cause=cause, **number)
    note(directory, 1030.7, "incident", what="rewound", to_step=24, **number)
    note(directory, 1040.5, "incident", what="closed", step=39, **number)
    return run


def test_report_tells_what_was_tried(make: Make) -> None:
    run = with_trials(
        make(), suspects_tried(verdict="mixed"), remedies_tried(), cause="state", actions=["adjust"]
    )
    (folder,) = write_incidents(run)
    (evidence,) = incidents_of(run)
    suspects, remedies = evidence.trials
    assert (suspects.chosen, remedies.chosen, suspects.last, remedies.last) == ("", "reset_moments", 40, 32)
    assert suspects.control is not None and suspects.control.name == "without the suspects"
    assert "the suspects were read again" in suspects.details
    assert "step 24: moments reset won: only with" in remedies.summary
    assert "with the remedy whose branch was clearly better: moments reset." in sentences.write_headline(
        evidence
    )
    page, text = texts_of(folder)
    told = "Tried at step 31, on the state after step 24: 16 steps with 16 suspects, and the same steps without: "
    assert f"{told}they do harm." in page and f"{told}they do harm." in text
    assert (
        '<td>with the suspects</td><td class="n">0</td><td class="n">4.510</td><td class="n">+0.310 ± 0.020'
        in page
    )
    assert '<tr class="own"><td>moments reset</td><td class="n">4</td>' in page
    assert "| rate cut | 2 | 3.300 | -0.900 ± 0.060 | 3.50 |  |" in text
    assert "](branches.png)" in text and "](branches-2.png)" in text and page.count("data:image/png") == 3
    assert read_back(folder) == evidence
    corpus = remedies.model_copy(update={"chosen": "without the corpus", "corpus": "web"})
    assert not corpus.has_remedy and "The run went on as in the chosen one." in corpus.details
    nothing = remedies.model_copy(update={"chosen": "nothing"})
    assert "No remedy won, so none was taken." in nothing.details


@pytest.mark.parametrize(
    ("verdict", "cause", "chosen"),
    [("new", "new_data", "with"), ("noise", "new_data", "with"), ("noise", "data", "without"),
     ("mixed", "state", "without")],
)  # fmt: skip
def test_evidence_names_the_branch_that_the_run_went_on_with(
    make: Make, verdict: str, cause: str, chosen: str
) -> None:
    (evidence,) = incidents_of(with_trials(make(), suspects_tried(verdict=verdict), cause=cause))
    assert evidence.trials[0].chosen == f"{chosen} the suspects"


def test_evidence_has_the_trial_before_the_opening_and_none_of_other_matters(make: Make) -> None:
    run = make()
    directory = RunDirectory(run)
    note(directory, 1020.0, "branches_tried", **suspects_tried(reason="of samples that were examined"))
    note(directory, 1020.1, "samples_examined", step=31, first=30, last=30, reason="none is bad")
    note(directory, 1030.0, "branches_tried", **suspects_tried(step=29, reason="too early"))
    note(directory, 1030.1, "branches_tried", **suspects_tried(reason="of a look back"))
    with_trials(run, suspects_tried(branches=[]), suspects_tried(reason=""))
    note(directory, 1050.0, "branches_tried", **suspects_tried(reason="after it was over"))
    (evidence,) = incidents_of(run)
    assert [trial.reason for trial in evidence.trials] == ["of a look back", ""]
    assert evidence.trials[1].summary.endswith(": with the suspects, without the suspects.")


def test_write_incidents_makes_a_folder_of_files_that_a_person_opens(spike: Path) -> None:
    (folder,) = write_incidents(spike)
    (evidence,) = incidents_of(spike)
    assert folder == spike / "incidents" / "0001"
    assert {p.name for p in folder.iterdir()} == {
        "report.html", "postmortem.md", "plot.png", "tokens.png", "samples.txt", "documents.csv", "layers.csv",
        "evidence.json",
    }  # fmt: skip
    _, text = texts_of(folder)
    assert "**At step 30 the loss jumped from 4.00 to 9.00.** 12 samples of " in text
    assert (
        "to step 29, skipped them and continued. By step 39 the loss was on its trend again, at 4.10." in text
    )
    parts = "Symptoms Evidence Classification Recovery Outcome Cost Follow-ups Timeline Files".split()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == parts
    assert "0001/report.html" in (folder.parent / "index.html").read_text()
    # For machines, too.
    assert read_back(folder) == evidence
    assert (evidence.back_to, evidence.healed_at, evidence.problems) == ([29], 39, [])
    first, second = evidence.passes
    assert (first[-1].step, first[-1].applied, second[0].step, second[0].loss) == (31, False, 30, 4.0)
    assert [s.position for s in evidence.samples] == list(range(236, 248))
    assert evidence.suspects[0].loss == 9.5 == evidence.samples[0].loss
    (row,) = csv.DictReader((folder / "layers.csv").open())
    assert row == {
        "name": "blocks.0", "statistic": "activation_rms", "before (step 20)": "1.0", "during (step 31)": "8.0",
        "after (step 60)": "3.0", "ratio": "8.0",
    }  # fmt: skip


def test_incident_shows_the_loads_of_experts_before_during_and_after_it(
    make: Make, hostile_corpus: Path
) -> None:
    root = make(data_incident(hostile_corpus, [(236, 248)]))
    run = RunDirectory(root)
    (dense,) = incidents_of(root)
    assert not has_routers(dense) and collect_loads(dense.layers) == []
    steps, layers = Recorder(run.steps, 1), Recorder(run.layers, 1, LAYER_SCHEMA)
    steps.add_records(
        replace(
            step_record(51, 1052.0, 4.0),
            expert_violation=1.5,
            expert_idle=0.0,
            router_entropy=1.0,
            router_z=2.0,
        )
    )
    # Blocks 1 and 12 have experts; the record of block 12 in the middle of it is gone.
    for step, time, loads in (
        (20, 1019.0, {1: [1.0, 1.25, 0.75], 12: [1.5, 0.5, 1.0]}),
        (31, 1030.0, {1: [0.0, 2.5, 0.5]}),
        (60, 1060.0, {1: [1.0, 1.0, 1.0], 12: [0.0, 3.0, 0.0]}),
    ):
        layers.add_records(*[
            LayerRecord(step, time, f"blocks.{block}.mlp.experts.{expert}", expert_load=load, expert_bias=0.0)
            for block, block_loads in loads.items() for expert, load in enumerate(block_loads)
        ])  # fmt: skip
    (evidence,) = incidents_of(root)
    looks = collect_loads(evidence.layers)
    assert [(look.step, look.blocks) for look in looks] == [(20, [1, 12]), (31, [1, 12]), (60, [1, 12])]
    assert looks[0].loads.tolist() == [[1.0, 1.25, 0.75], [1.5, 0.5, 1.0]]
    assert looks[1].loads[0].tolist() == [0.0, 2.5, 0.5] and np.isnan(looks[1].loads[1]).all()
    told = (
        "Largest load of an expert, in times the mean of its layer: 1.5 at step 20, before the onset (expert 0 of "
        "block 12); 2.5 at step 31, in the middle of it (expert 1 of block 1, 1 of 3 experts without a token); 3 at "
        "step 60, when it was over (expert 1 of block 12, 2 of 6 experts without a token)."
    )
    (folder,) = write_incidents(root)
    page, text = texts_of(folder)
    assert told in text and "![" + told + "](loads.png)" in text and "](routers.png)" in text
    assert f'alt="{told}"' in page and page.count("data:image/png") == 4
    for name in ("routers.png", "loads.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_cost_is_counted_in_steps_tokens_hours_and_money(make: Make, hostile_corpus: Path) -> None:
    price = {"gpu_hour_price": 3600.0, "currency": "EUR"}
    (evidence,) = incidents_of(make(data_incident(hostile_corpus, [(236, 248)]), supervise=price))
    cost = evidence.cost
    assert (cost.steps, cost.tokens, cost.batches_refused) == (2, 2 * 8 * LENGTH, 2)
    assert cost.seconds == pytest.approx(2 * 0.5 + 1.5)  # two steps done again, and the search
    assert cost.gpu_hours == pytest.approx(2 * 2.5 / 3600) and cost.money == pytest.approx(2 * 2.5)
    assert "3600 EUR" in sentences.cost_explained(evidence) and "5.00 EUR" in pages.render_index([evidence])


def test_skipped_tells_what_for_how_long_and_how_another_run_skips_it(
    make: Make, hostile_corpus: Path
) -> None:
    root = make(data_incident(hostile_corpus, [(236, 248)]))
    config = load_recipe(root / "recipe.yaml")
    order = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).train.order
    append_entries(
        root / "skips.jsonl", sample_entries(order, np.arange(236, 248), "they are bad", (), 1, 30)
    )
    append_entry(root / "skips.jsonl", SkipEntry(first=300, end=310, reason="a window", incident=1))
    append_entry(
        root / "skips.jsonl", SkipEntry(first=9, end=2**62, reason="again", incident=1, corpus="web")
    )
    (evidence,) = incidents_of(root)
    samples, window, corpus = sentences.list_skipped(evidence)
    assert samples[0] == f"samples of corpus {order.corpora[0].name}" and samples[2] == "in every epoch"
    assert window == ("samples", "positions 300-309", "in this epoch", "a window")
    assert corpus == ("corpus web", "from position 9", "for good", "again")
    assert "| samples | positions 300-309 | in this epoch | a window |" in pages.render_postmortem(
        evidence, []
    )
    again = next(f for f in sentences.follow_ups(evidence) if f.command.startswith("mkdir"))
    subprocess.run(again.command, shell=True, check=True, cwd=root)
    (given,) = read_ledger(root / "RUN/skips.jsonl")
    assert given == read_ledger(root / "skips.jsonl")[0].model_copy(update={"incident": None, "step": None})


# Again and again


@pytest.mark.slow
def test_write_incidents_writes_again_what_changed_and_nothing_else(make: Make, hostile_corpus: Path) -> None:
    one = data_incident(hostile_corpus, [(236, 248)])
    run = make(one)
    journal = RunDirectory(run)
    note(journal, 1050.0, "evaluated", step=50, loss=3.9)
    tell(journal, one.model_copy(update={"number": 2, "outcome": "open", "loss_after": None}), 1060.0)
    assert [p.name for p in write_incidents(run)] == ["0001", "0002"]
    before = {p: p.stat().st_mtime_ns for p in run.glob("incidents/**/*")}
    assert write_incidents(run) == []
    assert {p: p.stat().st_mtime_ns for p in run.glob("incidents/**/*")} == before
    closed = one.model_copy(update={"number": 2}).model_dump(mode="json")
    note(journal, 1080.0, "incident", what="closed", number=2, summary=closed)
    assert [p.name for p in write_incidents(run)] == ["0002"]
    assert [p.name for p in write_incidents(run, again=1)] == ["0001"]


@pytest.mark.slow
def test_write_incidents_writes_whole_what_was_killed_or_found_no_room(
    spike: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        files_no_larger_than(20_000),
        pytest.raises(DataError, match=r"0001 could not be written: .*make room"),
    ):
        write_incidents(spike)
    assert not list(spike.glob("incidents/**/.*")), "no temporary file stays"
    (folder,) = write_incidents(spike)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}

    def killed(path: Path, content: bytes) -> None:
        raise KeyboardInterrupt

    (folder / "samples.txt").write_text("of an older version")
    monkeypatch.setattr(postmortem, "write_file", killed)
    with pytest.raises(KeyboardInterrupt):
        write_incidents(spike, again=1)
    monkeypatch.undo()
    assert not (folder / "evidence.json").exists()
    assert write_incidents(spike) == [folder]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole


# Whatever the texts say


class Structure(HTMLParser):
    """The tags of a page with the names of their attributes; escapes set apart are no structure."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.addresses: set[str] = set()
        self.text = ""
        self._escape = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if ("class", "esc") in attrs:
            self._escape += 1
            return
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.addresses |= {value or "" for name, value in attrs if name in ("href", "src")}

    def handle_endtag(self, tag: str) -> None:
        if self._escape and tag == "span":
            self._escape -= 1
        else:
            self.tags.append((f"/{tag}", ()))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment", ()))


def saying(evidence: Evidence, text: str) -> Evidence:
    """The same incident, with `text` wherever text comes from outside."""
    document = Document(corpus=text, shard=text, document=1, first_token=0, tokens=5)
    incident = evidence.incident.model_copy(
        update={"failure": f"f{text}", "reasons": [text], "documents": [document], "outcome": f"o{text}"}
    )
    sample, tokens, layers = evidence.samples[0], evidence.tokens, evidence.layers
    assert tokens is not None and layers is not None
    pieces = [sample_texts.DocumentText(text=text, ends=True, shard=text, document=3)]
    return evidence.model_copy(update={
        "run": evidence.run.model_copy(update={"name": text, "currency": text}),
        "incident": incident, "problems": [text],
        "samples": [sample.model_copy(update={"corpus": text, "pieces": pieces})],
        "timeline": [entry.model_copy(update={"text": text}) for entry in evidence.timeline],
        "logs": [Log(source=text, ranks=f"r{text}", file="attempt.log", bytes=3, tail=f"log {text}")],
        "layers": layers.model_copy(update={"values": [v.model_copy(update={"name": text}) for v in layers.values]}),
        "tokens": tokens.model_copy(update={"top": [s.model_copy(update={"text": text}) for s in tokens.top]}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def evidence(hostile_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    root = tmp_path_factory.mktemp("evidence") / "run"
    (evidence,) = incidents_of(make_run(hostile_corpus, root, data_incident(hostile_corpus, [(236, 248)])))
    return evidence


QUICK = settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
FILES = ["report.html", "samples.txt", "attempt.log"]


@QUICK
@given(text=HOSTILE)
def test_report_has_no_tag_and_no_attribute_of_a_text(evidence: Evidence, text: str) -> None:
    bad, good = saying(evidence, text), saying(evidence, "harmless")
    page, plain = (
        Structure(pages.render_report(bad, {}, FILES)),
        Structure(pages.render_report(good, {}, FILES)),
    )
    assert page.tags == plain.tags and page.addresses == plain.addresses
    assert all(c.isprintable() or c in "\n\t" for c in page.text)
    assert Structure(pages.render_index([bad])).tags == Structure(pages.render_index([good])).tags
    for content in (pages.render_samples(bad), pages.render_documents(bad), pages.render_layers(bad.layers)):  # type: ignore[arg-type]
        assert all(c.isprintable() or c in "\n\t" for c in content)
    forged = pages.render_samples(saying(evidence, f"\n== {text}")).split("\n")
    assert sum(line.startswith("==") for line in forged) == 1


@QUICK
@given(text=HOSTILE)
def test_postmortem_has_no_markup_of_a_text(evidence: Evidence, text: str) -> None:
    def kinds(evidence: Evidence) -> Iterator[str]:
        markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
        for token in markdown.parse(pages.render_postmortem(evidence, FILES)):
            yield token.type
            for part in token.children or ():
                if part.type not in ("text", "softbreak") and part.content != "<!-- -->":
                    yield part.type

    # Empty cells and names are as good as any other.
    assert list(kinds(saying(evidence, f"a{text}z"))) == list(kinds(saying(evidence, "harmless")))


def test_report_needs_nothing_from_elsewhere(spike: Path) -> None:
    (folder,) = write_incidents(spike)
    page = Structure((folder / "report.html").read_text())
    inside = {a for a in page.addresses if a.startswith("data:image/png;base64,")}
    assert len(inside) == 2
    assert all((folder / address).resolve().exists() for address in page.addresses - inside)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "\\x1b[31m<script>" in page.text.replace("\n", "")


def test_tokens_picture_escapes_what_the_font_has_not(
    evidence: Evidence, recwarn: pytest.WarningsRecorder
) -> None:
    tokens = saying(evidence, f"日\U0001f600$a_b$ \\frac{NASTY}").tokens
    assert tokens is not None and pictures.draw_tokens(tokens).startswith(b"\x89PNG")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


# Other incidents


def test_report_of_a_crash_shows_failure_log_and_stacks(make: Make) -> None:
    root = make()
    evidence_paths = ["logs/a.log", "logs/a/rank-1.stacks", "../../secret", "logs/no"]
    run, crash = RunDirectory(root), breakdown(evidence=evidence_paths)
    (root / "logs/a").mkdir(parents=True)
    (root / "logs/a.log").write_bytes(b"early\n" * 400_000 + b"\x1b[31mError: <b>\x07\x1b[0m")
    (root / "logs/a/rank-1.stacks").write_text("rank 1 on node-3: step after step 45\n")
    (root.parent.parent / "secret").write_text("x")
    number = {"number": 1, "summary": crash.model_dump(mode="json")}
    note(run, 1100.0, "ended", attempt=1, failure=crash.failure, step=45)
    note(run, 1100.1, "incident", what="opened", **number)
    note(run, 1101.0, "launched", attempt=2)
    note(run, 1108.0, "training", step=40, cursor=320, world=2)
    note(run, 1108.5, "incident", what="restarted", step=40, **number)
    (folder,) = write_incidents(root)
    (evidence,) = incidents_of(root)
    _, text = texts_of(folder)
    wanted = f"**R{crash.failure[1:]}.** The run resumed from step 40; steps repeated: 5."
    assert text.splitlines()[2].startswith(wanted) and "\nError: <b>\\x07\n```" in text
    assert (folder / "log-a.log").stat().st_size < 1.1 * 2**20 and (folder / "log-a-rank-1.stacks").exists()
    assert [p.split()[0] for p in evidence.problems] == ["../../secret:", "logs/no:"]
    assert not evidence.samples and evidence.tokens is None and not (folder / "tokens.png").exists()
    # 8 s without training, and 5 steps of half a second, on 2 ranks.
    assert evidence.cost.seconds == pytest.approx(8 + 2.5)
    assert evidence.cost.gpu_hours == pytest.approx(2 * 10.5 / 3600)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "hang", "failure": ""}, "After step 45 the run hung."),
        ({"verdict": "damaged_checkpoint", "cause": "storage", "failure": ""}, "was damaged, and passed over."),
        (SPIKE | {"cause": "numerics", "actions": ["fall_back"], "kernels": ["attention sdpa"]},
         "without attention sdpa the same step is harmless. The run was rewound in memory to step 29 and continued "
         "without attention sdpa."),
        (SPIKE | {"cause": "learning_rate", "actions": ["rewind", "fall_back"]},
         "the learning rate was too high, or FP8 the cause. The"),
        (SPIKE | {"cause": "state", "actions": ["rewind"], "deferred": [(232, 240)], "returns": [(472, 480)],
                  "positions": [(240, 248)], "lost": 8},
         "8 samples deferred; read again from position 472 (about step 60), 8 samples skipped in this epoch: no room "
         "to read them later."),
        (SPIKE | {"cause": "learning_rate", "actions": ["rewind", "cut_lr"], "released": 2},
         "and continued with a smaller learning rate. 2 samples no longer skipped."),
        (SPIKE | {"verdict": "drift", "actions": []}, "the loss drifted away, from 4.00 to 9.00. It is still open"),
        (SPIKE | {"verdict": "non_finite", "loss_peak": None, "actions": []}, "were not finite."),
        (SPIKE | {"loss_peak": 4.0, "actions": ["stop"], "outcome": "stopped"}, "norm jumped to 7.50, the loss"),
        (SPIKE | {"verdict": "plateau", "loss_peak": None, "actions": []}, "the loss stayed above its old level."),
        (SPIKE | {"cause": "hardware", "verdict": "corrupted", "reasons": ["rank 2 got negated"], "actions": []},
         "At step 30 hardware was wrong: rank 2 got negated."),
    ],
)  # fmt: skip
def test_headline_has_words_for_every_kind_of_incident(make: Make, change: dict[str, Any], said: str) -> None:
    (evidence,) = incidents_of(make(breakdown(**({"failure": ""} | change))))
    assert said in sentences.write_headline(evidence) and sentences.follow_ups(evidence)
    Structure(pages.render_report(evidence, {}, FILES))
    MarkdownIt().parse(pages.render_postmortem(evidence, FILES))


def test_evidence_says_what_is_missing_and_goes_on(spike: Path, hostile_corpus: Path) -> None:
    run = RunDirectory(spike)
    sorted(run.steps.iterdir())[1].write_bytes(b"PAR1")
    run.journal.write_bytes(run.journal.read_bytes() + b'{"time": 10')
    (evidence,) = incidents_of(spike)
    assert len(evidence.problems) == 1 and "is damaged" in evidence.problems[0] and evidence.samples
    config = yaml.safe_load(run.recipe.read_text())
    config["config"]["data"]["corpora"][0]["path"] = str(spike / "gone")
    run.recipe.write_text(yaml.safe_dump(config))
    (evidence,) = incidents_of(spike)
    assert any(p.startswith("the texts: ") and "gone" in p for p in evidence.problems)
    run.recipe.unlink()
    (folder,) = write_incidents(spike)
    (evidence,) = incidents_of(spike)
    assert (
        any(p.startswith("the recipe: ") for p in evidence.problems) and evidence.cost.gpu_hours is not None
    )
    assert "What could not be had" in (folder / "report.html").read_text()
    assert not (folder / "samples.txt").exists() and (folder / "plot.png").exists()


def test_command_writes_and_prints(spike: Path) -> None:
    def call(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [str(a) for a in arguments])
        return done.exit_code, done.output

    assert call(spike, "--json")[1].count('"format"') == 1 and not (spike / "incidents").exists()
    assert json.loads(call(spike, 1, "--json")[1])["incident"]["number"] == 1
    code, said = call(spike)
    assert code == 0 and said.replace("\n", "").endswith("incidents/0001/report.html")
    assert "nothing new" in call(spike)[1]
    for arguments in ((spike, 9), (spike, 9, "--json"), (spike / "no",)):
        code, said = call(*arguments)
        assert code == 2 and "Traceback" not in said and "journal.jsonl" in said


@pytest.mark.slow
def test_command_runs_where_no_torch_is() -> None:
    heavy = "{'torch', 'deepspeed', 'matplotlib'}"
    code = f"import sys, megastable.report.postmortem.__main__; print(sorted({heavy} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Parts


def test_passes_tell_what_was_done_again_from_what_stood() -> None:
    numbers = [1, 2, 3, 4, 3, 4, 5, 2, 3, 4, 5, 6]
    same: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "first_position": 0, "next_position": 8}
    parts = split_passes([StepRow(step=step, time=time, **same) for time, step in enumerate(numbers)])
    assert [[r.step for r in part] for part in parts] == [[1, 2, 3, 4], [3, 4, 5], [2, 3, 4, 5, 6]]
    stood, undone = pictures.split_standing(parts)
    assert [r.step for r in stood] == [1, 2, 3, 4, 5, 6]
    assert [[r.step for r in part] for part in undone] == [[2, 3, 4], [1, 2, 3, 4, 5]]
