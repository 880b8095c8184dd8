"""Passwords that somebody wrote into a recipe or on the command line: used, and not written on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megastable.config import RunConfig
from megastable.errors import ConfigError
from megastable.recipe import load, main
from megastable.rundir import RunDirectory
from megastable.supervise import hooks
from megastable.supervise.settings import SuperviseConfig, redacted, redacted_override
from megastable.supervise.status import read_status
from tests.supervise.runs import journal

HOOK = "https://hooks.example.com/services/T0/B0/hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOOK, "https://hooks.example.com/<redacted>"),
        ("http://10.0.0.7:8080/?token=hunter2", "http://10.0.0.7:8080/<redacted>"),
        ("https://me:hunter2@host", "https://host/<redacted>"),
        (f'curl -d @- "{HOOK}" -s', 'curl -d @- "https://hooks.example.com/<redacted>" -s'),
        (f"{{webhook: {HOOK}, x: 5}}", "{webhook: https://hooks.example.com/<redacted>, x: 5}"),
        (redacted(HOOK), "https://hooks.example.com/<redacted>"),
        ("$MEGASTABLE_WEBHOOK", "$MEGASTABLE_WEBHOOK"),
        ("https://hooks.example.com/services/$TOKEN", "https://hooks.example.com/services/$TOKEN"),
        ("https://hooks.example.com", "https://hooks.example.com"),
        ("mail -s trouble me@example.com", "mail -s trouble me@example.com"),
    ],
)  # fmt: skip
def test_what_is_left_of_an_address(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_overrides_of_other_parts_stay() -> None:
    assert redacted_override(f"supervise.webhook={HOOK}").endswith("/<redacted>")
    assert redacted_override(f"supervise={{webhook: '{HOOK}'}}").endswith("/<redacted>'}")
    assert redacted_override("data.corpora=[{path: s3://b/c}]") == "data.corpora=[{path: s3://b/c}]"


@pytest.mark.parametrize("key", ["webhook", "command"])
def test_the_frozen_recipe_has_none_and_says_so_when_it_is_started(key: str, tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"dir": tmp_path}, "supervise": {key: HOOK}})
    run = RunDirectory(tmp_path)
    run.freeze(config, [], {})
    assert "hunter2" not in run.recipe.read_text() and getattr(config.supervise, key) == HOOK
    assert run.compare(config) == []
    frozen = load(run.recipe)
    with pytest.raises(ConfigError, match=rf"supervise\.{key}: its address was left out .* give it again"):
        hooks.check(frozen.supervise)
    assert frozen.supervise.exposed == []


def test_what_an_older_version_wrote_is_not_told_on(tmp_path: Path) -> None:
    """Neither as a change of the recipe, which is journaled, nor in the command that goes on."""
    run = RunDirectory(tmp_path)
    config = RunConfig.model_validate({"supervise": {"webhook": HOOK + "2"}})
    tree = config.model_dump(mode="json")
    tree["supervise"]["webhook"] = HOOK
    run.recipe.write_text(yaml.safe_dump({"config": tree, "manifests": [], "deepspeed_json": {}}))
    assert run.compare(config) == []
    elsewhere = RunConfig.model_validate({"supervise": {"webhook": "$HOOK"}})
    assert run.compare(elsewhere) == ["supervise.webhook: https://hooks.example.com/<redacted> -> $HOOK"]
    told = {"recipe": "r.yaml", "overrides": [f"supervise.webhook={HOOK}"], "given": []}
    journal(tmp_path, {"event": "supervisor", "what": "started", "pid": 1, "host": "h", **told})
    assert "hunter2" not in read_status(tmp_path).advice


def test_it_is_warned_of_where_it_is_written_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (warning,) = SuperviseConfig(webhook=HOOK).exposed
    assert "supervise.webhook='$NAME'" in warning and "chmod 600" in warning and "hunter2" not in warning
    assert SuperviseConfig(webhook="$HOOK", command="mail me").exposed == []
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"supervise: {{webhook: '{HOOK}'}}\n")
    main([str(recipe)])
    printed = capsys.readouterr()
    assert warning in printed.err and "hunter2" not in printed.out + printed.err
