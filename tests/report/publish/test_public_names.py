"""Names of hosts, corpora and tasks in a record, whatever they are called, and the numbers that belong to them."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from megastable.base.text import visible
from megastable.config.tree import RunConfig
from megastable.report.postmortem import safe
from megastable.report.publish import find_leaks, publish
from megastable.report.publish.public_run import NOT_OF_RECIPE, public_copy
from megastable.report.publish.redaction import Keeping, PublicNames, Redactor, collect
from megastable.report.run_page.page_file import whole
from megastable.run.directory import RunDirectory, as_json
from megastable.run.goodput.watching import read_account
from megastable.run.records import Recorder
from tests.report.run_page.made_runs import BEGIN, begin, curve, made_run, note, progress
from tests.report.run_page.run_files import record

NONE = Keeping()
PUBLIC_TEXTS = {
    "checkpoint.interval",
    "data.corpora.path",
    "precision.fp8.keep",
    "eval.device",
    "supervise.currency",
}  # redacted by rules


def events(run: RunDirectory, folder: Path, name: str, keep: Keeping = NONE) -> list[dict[str, Any]]:
    """The events of a kind in the public copy, which is written to `folder`."""
    public_copy(run.root, folder, keep)
    found = [json.loads(line) for line in RunDirectory(folder).journal.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


@pytest.mark.slow
def test_losses_and_scores_keep_their_values_and_lose_their_names(tmp_path: Path) -> None:
    """`web` and `code` are words that megastable uses; the names of the tasks are not."""
    run = made_run(tmp_path / "run", eval={"command": "python -m megastable.train {model} {results}"})
    scores = {"acme_quiz/acc": 0.25, "acme_talk/acc": 0.5, "other/acc": 0.75}
    fields = {"checkpoint": "step-50", "of_step": 50, "manifest": "m", "tokens": 1, "scores": scores}
    note(run, BEGIN + 900, "tasks_evaluated", **fields)
    text = "no validation loss of the corpus code, which was taken out of the blend; the code is fine"
    note(run, BEGIN + 901, "warning", step=3, text=text)
    losses = {"web": 3.0, "code": 2.0}
    run.summary.write_text(json.dumps({"steps": 200, "val_loss": 2.5, "val_loss_by_corpus": losses}))
    done = publish(run.root, tmp_path / "public", NONE)
    web, code = (done.made.names.of("corpus", name) for name in losses)
    assert list(events(run, tmp_path / "a", "evaluated")[0]["corpora"]) == [web, code]
    told = events(run, tmp_path / "b", "tasks_evaluated")[-1]["scores"]
    assert list(told.values()) == [0.25, 0.5, 0.75] and all(name.startswith("task-") for name in told)
    shown = events(run, tmp_path / "c", "warning")[-1]["text"]
    assert shown == text.replace("corpus code", f"corpus {code}")
    summary = json.loads(RunDirectory(tmp_path / "c").summary.read_text())
    assert summary["val_loss_by_corpus"] == {web: 3.0, code: 2.0}
    page = (tmp_path / "public" / "index.html").read_text()
    assert "acme_quiz" not in page and '"web"' not in page and f'"{web}"' in page
    assert {"eval.command"} <= set(done.made.recipe_without)
    named = Keeping(names=True)
    assert events(run, tmp_path / "d", "tasks_evaluated", named)[-1]["scores"] == scores
    assert list(events(run, tmp_path / "e", "evaluated", named)[0]["corpora"]) == ["web", "code"]


def test_a_host_that_documentation_names_is_replaced_too() -> None:
    """And one that is called as another one's pseudonym does not take the blame."""
    names = PublicNames()
    collect({"hosts": ["host-2", "host-1", "node-1", "step"]}, names)
    redact = Redactor(names)
    assert redact.text("rank 1 on host-1, host-2 and node-1 was killed") == (
        "rank 1 on host-2, host-1 and host-3 was killed"
    )
    assert redact.text("rank 1 on step was killed at step 5") == "rank 1 on host-4 was killed at step 5"


def test_a_name_that_is_a_number_changes_no_number() -> None:
    names = PublicNames()
    collect([{"corpus": "2023"}, {"corpus": "2023-06"}], names)
    told = Redactor(names).text("step 2023 of 4000: corpus 2023 has 2023 documents, corpus '2023-06' none")
    assert told == "step 2023 of 4000: corpus corpus-1 has 2023 documents, corpus 'corpus-2' none"


def test_unknown_keys_stay_apart() -> None:
    given = {"acme": 1, "hunter2": 2, "step": 3, "zebra9": {"acme": 4}}
    assert Redactor(PublicNames()).tree(given) == {
        "[withheld]": 1, "[withheld] 2": 2, "step": 3, "[withheld] 3": {"[withheld]": 4},
    }  # fmt: skip


def keys_of_texts(model: type[BaseModel], before: str = "") -> set[str]:
    """Keys of the recipe that may hold any text."""
    found = set()
    for name, field in model.model_fields.items():
        inner = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
        if below := [one for one in inner if issubclass(one, BaseModel)]:
            found |= {key for one in below for key in keys_of_texts(one, f"{before}{name}.")}
        elif any(issubclass(one, str | Path) for one in inner):
            found.add(f"{before}{name}")
    return found


def test_every_key_that_holds_any_text_is_private_or_looked_at_here() -> None:
    """A new one must be added to NOT_OF_RECIPE, or to the list of this test."""
    of_private_sections = {"data.validation.path", "data.validation.name"}
    assert keys_of_texts(RunConfig) - NOT_OF_RECIPE - of_private_sections == PUBLIC_TEXTS


@pytest.mark.slow
def test_a_change_of_a_private_key_is_told_without_its_values(tmp_path: Path) -> None:
    """Numbers and words of megastable, which any other text may have."""
    run = begin(tmp_path / "run")
    private = [f"{key}: 9137 -> run the 9200" for key in sorted(NOT_OF_RECIPE)]
    changes = [
        "train.steps: 100 -> 220",
        "data.corpora: [{'path': 'data/stdlib'}] -> []",
        "supervise: None -> {8}",
    ]
    note(run, BEGIN + 30, "config_changed", changes=[*private, *changes])
    (event,) = events(run, tmp_path / "copy", "config_changed")
    keys = [*sorted(NOT_OF_RECIPE), "data.corpora", "supervise"]
    wanted = ["train.steps: 100 -> 220", *(f"{key}: [withheld]" for key in keys)]
    assert sorted(event["changes"]) == sorted(wanted)
    publish(run.root, tmp_path / "public", NONE)
    page = (tmp_path / "public" / "index.html").read_text()
    assert "9200" not in page and "220" in page


@pytest.mark.slow
def test_the_copy_has_the_steps_and_the_account_of_the_run(tmp_path: Path) -> None:
    """Also if a clock was set back, and if the records were compacted."""
    run, time = begin(tmp_path / "run"), BEGIN + 22
    recorder = Recorder(run.steps, 2)
    for step in range(1, 101):
        recorder.add(record(step, time, curve(step)))
        time += 1 if step != 50 else -9.5
        if step == 60:
            recorder.compact()
    progress(run, 100, time, curve(100))
    public_copy(run.root, tmp_path / "copy", NONE)
    for root in (run.root, tmp_path / "copy"):
        with whole(root).records.table() as table:
            assert table.steps["step"].tolist() == list(range(1, 101)) and not table.steps["undone"].any()
    assert read_account(run.root)[0].facts() == read_account(tmp_path / "copy")[0].facts()


@pytest.mark.parametrize(
    "name", ["gpu_~7~x", "<häuser-9>", "acme&sons", "ann@acme-box", "back\\slash9", "zwei\u202e9ab"]
)
def test_the_last_search_finds_a_name_in_every_form(name: str, tmp_path: Path) -> None:
    texts = {
        "README.md": safe.markdown(f"on {name} now"), "index.html": f"<p>on {html.escape(visible(name))}</p>",
        "journal.jsonl": as_json({"text": f"on {name}"}), "plain.txt": f"on {name}",
    }  # fmt: skip
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    assert find_leaks(tmp_path, [name]) == sorted(texts)
