"""Passwords that somebody wrote into a recipe or on the command line: used, and not written on."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from megastable.base.errors import ConfigError
from megastable.config.recipe import load_recipe, override_key
from megastable.config.supervise import SuperviseConfig, redact_override
from megastable.config.tree import RunConfig
from megastable.run.directory import RunDirectory
from megastable.supervise import hooks

HOOK = "https://hooks.example.com/services/T0/B0/hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOOK, "https://hooks.example.com/<redacted>"),
        ("http://10.0.0.7:8080/?token=hunter2", "http://10.0.0.7:8080/<redacted>"),
        ("https://me:hunter2@host", "https://<redacted>@host"),
        ("https://host#hunter2", "https://host#<redacted>"),
        (HOOK + "$$x", "https://hooks.example.com/<redacted>"),
        (HOOK + "/$CHANNEL", "https://hooks.example.com/<redacted>"),
        ("https://h/a,hunter2", "https://h/<redacted>"),
        ("https://h/a hunter2'", "https://h/<redacted>"),
        ("$BASE/hunter2", "<redacted>"),
        ("$$hunter2", "<redacted>"),
        ("https://hunter2:x/y", "https://<redacted>/<redacted>"),
        ("https://hooks.example.com/<redacted>", "https://hooks.example.com/<redacted>"),
        ("$MEGASTABLE_WEBHOOK", "$MEGASTABLE_WEBHOOK"),
        ("${MEGASTABLE_WEBHOOK}", "${MEGASTABLE_WEBHOOK}"),
        ("https://hooks.example.com/$TOKEN", "https://hooks.example.com/$TOKEN"),
        ("https://hooks.example.com", "https://hooks.example.com"),
    ],
)  # fmt: skip
def test_supervise_config_redacts_a_webhook(text: str, shown: str) -> None:
    config = SuperviseConfig(webhook=text)
    assert config.model_dump()["webhook"] == shown
    assert len(config.exposed) == (shown != text)
    assert SuperviseConfig(webhook=shown).model_dump()["webhook"] == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'curl -d @- "{HOOK}" -s', 'curl -d @- "https://hooks.example.com/<redacted>" -s'),
        ("tell https://user:p@ss@host/services/hunter2", "tell https://<redacted>@host/<redacted>"),
        ("tell https://h/a,hunter2$$x", "tell https://h/<redacted>"),
        ("curl -H 'Authorization: Bearer hunter2' h", "curl -H 'Authorization: Bearer <redacted>' h"),
        ("curl -H 'authorization: hunter2' h", "curl -H 'authorization: <redacted>' h"),
        ("curl -H 'X-Auth-Token:hunter2' h", "curl -H 'X-Auth-Token:<redacted>' h"),
        ("tell --api-key=hunter2 --token hunter2", "tell --api-key=<redacted> --token <redacted>"),
        ("tell --token 'my hunter2' x", "tell --token <redacted> x"),
        ("curl -H Authorization:\\ Bearer\\ hunter2 h", "curl -H Authorization:\\ Bearer\\ <redacted> h"),
        ("""tell '{"token": "hunter2"}'""", """tell '{"token": <redacted>}'"""),
        ("curl -H 'Authorization: Bearer $TOKEN' h", "curl -H 'Authorization: Bearer $TOKEN' h"),
        ("$HOME/bin/tell --token ${TOKEN} token secret", "$HOME/bin/tell --token ${TOKEN} token secret"),
        ("mail -s trouble me@example.com", "mail -s trouble me@example.com"),
    ],
)  # fmt: skip
def test_supervise_config_redacts_a_command(text: str, shown: str) -> None:
    config = SuperviseConfig(command=text)
    assert config.model_dump()["command"] == shown
    assert len(config.exposed) == (shown != text)
    assert SuperviseConfig(command=shown).model_dump()["command"] == shown


@pytest.mark.parametrize(("text", "mode"), [(HOOK, 0o600), ("$HOOK", 0o644)])
def test_freeze_lets_only_the_owner_read_a_recipe_with_a_password(
    text: str, mode: int, tmp_path: Path
) -> None:
    run, before = RunDirectory(tmp_path), os.umask(0o022)
    try:
        for _ in range(2):
            run.freeze_recipe(RunConfig.model_validate({"supervise": {"webhook": text}}), [], {})
            assert stat.S_IMODE(run.recipe.stat().st_mode) == mode
    finally:
        os.umask(before)


def test_hook_tells_failures_without_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of what is written down."""
    monkeypatch.setenv("HOOK", HOOK)
    for kind, text in [
        ("webhook", "$HOOK"),
        ("webhook", "https://h/a,hunter2"),
        ("command", "curl -H 'Authorization: Bearer hunter2' h"),
        ("command", "tell https://me:hunter2@h"),
        ("command", "tell $HOOK"),
    ]:
        told = hooks.Hook(kind, text, 1.0).redact_secrets(
            f"no luck with {text} {HOOK if 'HOOK' in text else ''}"
        )
        assert "hunter2" not in told and told.startswith("no luck with "), text


def test_redacted_override_leaves_other_parts() -> None:
    assert redact_override(f"supervise.webhook={HOOK}").endswith("/<redacted>")
    for text in (HOOK, f"{HOOK}$$x", "https://h/a,hunter2", "$BASE/hunter2"):
        assert "hunter2" not in redact_override(f"supervise.webhook={text}")
        whole = redact_override(f"supervise={{webhook: '{text}', metrics_port: 5}}")
        assert "hunter2" not in whole and "metrics_port: 5}" in whole
    assert redact_override("supervise={webhook: $HOOK}") == "supervise={webhook: $HOOK}"
    assert "hunter2" not in redact_override(f"supervise.webhook='{HOOK}")  # no YAML: it is refused elsewhere
    quoted = redact_override("supervise.command='curl -H \"Authorization: Bearer hunter2\" h'")
    tree: dict[str, Any] = {}
    override_key(tree, quoted)
    assert tree["supervise"]["command"] == 'curl -H "Authorization: Bearer <redacted>" h'
    assert redact_override("data.corpora=[{path: s3://b/c}]") == "data.corpora=[{path: s3://b/c}]"


@pytest.mark.parametrize("key", ["webhook", "command"])
def test_check_says_that_a_frozen_recipe_lacks_its_password(key: str, tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"dir": tmp_path}, "supervise": {key: HOOK}})
    run = RunDirectory(tmp_path)
    run.freeze_recipe(config, [], {})
    assert "hunter2" not in run.recipe.read_text() and getattr(config.supervise, key) == HOOK
    assert run.compare_recipe(config) == []
    frozen = load_recipe(run.recipe)
    with pytest.raises(ConfigError, match=rf"supervise\.{key}: its password was left out .* give it again"):
        hooks.check_hooks(frozen.supervise)
    assert frozen.supervise.exposed == []
