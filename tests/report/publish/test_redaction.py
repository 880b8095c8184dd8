"""What of a text may be published."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from megastable.base.text import make_visible
from megastable.config.tree import RunConfig
from megastable.report import safe
from megastable.report.publish import find_leaks
from megastable.report.publish.public_run import NOT_OF_RECIPE, public_copy
from megastable.report.publish.redaction import WITHHELD, Keeping, PublicNames, Redactor, collect_names
from megastable.report.run_page.page_file import read_whole
from megastable.run.directory import RunDirectory, as_json
from megastable.run.goodput.watching import read_account
from megastable.run.records import Recorder
from tests.report.run_page.made_runs import BEGIN, begin, curve, progress
from tests.report.run_page.run_files import record


def redactor(**keep: bool) -> Redactor:
    names = PublicNames(Keeping(**keep))
    collect_names(
        {"hosts": ["node-3.rack.example", "node-4"], "corpus": "acme mails", "shard": "acme-00000"}, names
    )
    return Redactor(names)


@pytest.mark.parametrize(
    "text",
    [
        "the loss stays above its trend since step 120: 2 observations, 20.7 sigma above the best",
        "40 of 48 samples are bad on the state before the onset, too: the worst has a loss of 10.24 (8 robust "
        "deviations above 1904 harmless ones), and by itself a gradient norm of 5.6; so many drawn at random "
        "are as bad in at most 0.01 % of draws. It extends 1 batches beyond the window and ends at position 1947",
        "no progress for 31 s in step, 30 s is the limit",
        "killed by signal 9 (SIGKILL)",
        "checkpoint step-200 saved: 63.1 MB in 1.6 s",
        "train.steps: 100 -> 220; optimizer.lr: 0.002 -> 1e-3",
        "RuntimeError: CUDA out of memory",
        "the loss is 3.2 nats per token and the token is not in the vocabulary",
        "2026-11-26T19:17:47.123456Z",
        "positions 1908-1947, 12:30:05, inf, nan",
    ],
)
def test_redactor_keeps_what_megastable_says(text: str) -> None:
    assert redactor().redact_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 1 on node-3.rack.example was killed", "rank 1 on host-1 was killed"),
        ("rank 1 on node-3 was killed", "rank 1 on host-1 was killed"),
        ("node-4:29500 is gone", "host-2:29500 is gone"),
        ("rank 1 on node-17 was killed", f"rank 1 on {WITHHELD} was killed"),
        ("rank 1 on host-9 was killed", f"rank 1 on {WITHHELD} was killed"),
        ("no space in /data/acme/run: the disk is full", f"no space in {WITHHELD}: the disk is full"),
        ("10.1.2.3 and fe80::1 are gone", f"{WITHHELD} and {WITHHELD} are gone"),
        ("the token: memory", f"the token: {WITHHELD}"),
        ("-token memory, Authorization: bearer run", f"-token {WITHHELD}, Authorization: {WITHHELD}"),
        ("PASSWORD=run", f"PASSWORD={WITHHELD}"),
        ("see https://wandb.ai/acme/x/runs/abc1 or me@example.org", f"see {WITHHELD} or {WITHHELD}"),
        ("hf_abcDEF123 sk-live-99 AKIA1234 x", f"{WITHHELD} x"),
        ("samples of corpus acme mails in acme-00000", "samples of corpus corpus-1 in shard-1"),
        ("step 123456789012", f"step {WITHHELD}"),
        ("the loss \ud800 \x1b \u202e is 3", f"the loss {WITHHELD} is 3"),
    ],
)
def test_redactor_withholds_what_others_say(text: str, shown: str) -> None:
    assert redactor().redact_text(text) == shown


def test_redactor_keeps_names_if_asked() -> None:
    assert redactor(hosts=True).redact_text("on node-4 and node-3") == "on node-4 and node-3"
    kept = redactor(names=True)
    assert kept.redact_text("of acme mails on node-4") == "of acme mails on host-2"
    assert kept.redact_tree({"shard": "acme-00000", "corpus": "another"}) == {
        "shard": "acme-00000",
        "corpus": "another",
    }


def test_redactor_keeps_the_form_of_trees() -> None:
    value = {
        "loss": 1.5,
        "applied": True,
        "none": None,
        "hunter2": [{"reason": "hunter2"}],
        "fingerprint": "ab" * 32,
    }
    assert redactor().redact_tree(value) == {
        "loss": 1.5, "applied": True, "none": None, WITHHELD: [{"reason": WITHHELD}], "fingerprint": "ab" * 32,
    }  # fmt: skip


@given(
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30), st.integers(0, 5)
)
def test_redactor_withholds_a_secret_whatever_is_around_it(around: str, where: int) -> None:
    secret = "Zq7vK2xW9pLm"
    text = around[:where] + " " + secret + " " + around[where:]
    assert secret not in redactor().redact_text(text)
    assert secret not in redactor().redact_text(around[:where] + secret + around[where:])


NONE = Keeping()
# Redacted by rules.
PUBLIC_TEXTS = {
    "checkpoint.interval",
    "data.corpora.path",
    "precision.fp8.keep",
    "eval.device",
    "supervise.currency",
}


def events(run: RunDirectory, folder: Path, name: str, keep: Keeping = NONE) -> list[dict[str, Any]]:
    """The events of a kind in the public copy, which is written to `folder`."""
    public_copy(run.root, folder, keep)
    found = [json.loads(line) for line in RunDirectory(folder).journal.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def test_redactor_replaces_hosts_that_documentation_names() -> None:
    """And one that is called as another one's pseudonym does not take the blame."""
    names = PublicNames()
    collect_names({"hosts": ["host-2", "host-1", "node-1", "step"]}, names)
    redact = Redactor(names)
    assert redact.redact_text("rank 1 on host-1, host-2 and node-1 was killed") == (
        "rank 1 on host-2, host-1 and host-3 was killed"
    )
    assert (
        redact.redact_text("rank 1 on step was killed at step 5") == "rank 1 on host-4 was killed at step 5"
    )


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


def test_recipe_keys_that_hold_any_text_are_private_or_looked_at_here() -> None:
    """A new one must be added to NOT_OF_RECIPE, or to the list of this test."""
    of_private_sections = {"data.validation.path", "data.validation.name"}
    assert keys_of_texts(RunConfig) - NOT_OF_RECIPE - of_private_sections == PUBLIC_TEXTS


@pytest.mark.slow
def test_public_copy_has_the_steps_and_the_account_of_the_run(tmp_path: Path) -> None:
    """Also if a clock was set back, and if the records were compacted."""
    run, time = begin(tmp_path / "run"), BEGIN + 22
    recorder = Recorder(run.steps, 2)
    for step in range(1, 101):
        recorder.add_records(record(step, time, curve(step)))
        time += 1 if step != 50 else -9.5
        if step == 60:
            recorder.compact_records()
    progress(run, 100, time, curve(100))
    public_copy(run.root, tmp_path / "copy", NONE)
    for root in (run.root, tmp_path / "copy"):
        with read_whole(root).records.hold_table() as table:
            assert table.steps["step"].tolist() == list(range(1, 101)) and not table.steps["undone"].any()
    assert read_account(run.root)[0].list_facts() == read_account(tmp_path / "copy")[0].list_facts()


@pytest.mark.parametrize(
    "name", ["gpu_~7~x", "<häuser-9>", "acme&sons", "ann@acme-box", "back\\slash9", "zwei\u202e9ab"]
)
def test_find_leaks_finds_a_name_in_every_form(name: str, tmp_path: Path) -> None:
    texts = {
        "README.md": safe.escape_markdown(f"on {name} now"),
        "index.html": f"<p>on {html.escape(make_visible(name))}</p>",
        "journal.jsonl": as_json({"text": f"on {name}"}), "plain.txt": f"on {name}",
    }  # fmt: skip
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    assert find_leaks(tmp_path, [name]) == sorted(texts)
