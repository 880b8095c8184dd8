"""The evaluation of a run on two hosts: beside its supervisor only, and beside the next one on another host."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from drills.chaos import VARIABLES
from drills.hosts import Host, Hosts
from drills.namespaces import Started, missing
from megastable.base.errors import OK
from megastable.run.directory import RunDirectory
from tests.convert.huggingface.conftest import text_corpus, tokenizer
from tests.downstream.complete_run import settings
from tests.downstream.test_beside_a_run import evaluated_by
from tests.patience import PATIENCE, until
from tests.supervise.test_supervisor import ROOT

__all__ = ["text_corpus", "tokenizer"]  # fixtures
STEPS = 60
EVALUATOR = "megastable_tools.downstream.evaluator"


@pytest.mark.slow
@pytest.mark.timeout(8 * PATIENCE)  # for each wait of the test
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_next_supervisor_on_another_host_evaluates_what_is_left(
    text_corpus: Path, tmp_path: Path
) -> None:
    notes, recipe, output = tmp_path / "notes", tmp_path / "recipe.yaml", tmp_path / "output.txt"
    notes.mkdir()
    with Hosts(tmp_path / "hosts", 2) as hosts:
        seen = RunDirectory(hosts.shared.outside / "run")
        tree = settings(text_corpus, hosts.shared.folder / "run", STEPS, batch=32).model_dump(mode="json")
        tree["eval"] |= evaluated_by(notes)
        tree["logging"]["trackers"] = ["jsonl"]
        recipe.write_text(yaml.safe_dump(tree))

        def supervise(host: Host) -> Started:
            words = [
                sys.executable,
                ROOT / "launch/supervise.py",
                recipe,
                "--",
                "--hostfile",
                hosts.folder / "hostfile",
            ]
            return host.start(words, output, {**VARIABLES, "PYTHONPATH": str(ROOT)}, ROOT)

        def events(name: str) -> list[dict[str, Any]]:
            lines = seen.journal.read_text().splitlines() if seen.journal.exists() else []
            return [event for event in map(json.loads, lines) if event["event"] == name]

        def begun() -> list[int]:
            return [int(path.name.split("-")[1]) for path in notes.glob("at-*")]

        first, second = hosts
        supervisor = supervise(first)
        until(begun)
        (step,) = begun()
        assert first.find(EVALUATOR) and not second.find(EVALUATOR)
        supervisor.send(9)
        until(lambda: not first.find(EVALUATOR) and not first.find(str(notes)))
        supervisor = supervise(second)
        until(lambda: len(begun()) == 2)
        assert second.find(EVALUATOR) and not first.find(EVALUATOR)
        for step in range(STEPS + 1):
            (notes / f"go-{step}").touch()
        assert supervisor.wait(PATIENCE) == OK, output.read_text()
        done = [event["of_step"] for event in events("tasks_evaluated")]
        assert done == sorted(set(done)) and done[-1] == STEPS
        assert len(events("launched")) == 1
