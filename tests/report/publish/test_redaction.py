"""What of a text may be published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.report.publish.redaction import WITHHELD, Keeping, PublicNames, Redactor, collect


def redactor(**keep: bool) -> Redactor:
    names = PublicNames(Keeping(**keep))
    collect(
        {"hosts": ["node-3.rack.example", "node-4"], "corpus": "acme mails", "shard": "acme-00000"}, names
    )
    return Redactor(names)


@pytest.mark.parametrize(
    "text",
    [
        "the loss stays above its trend since step 120: 2 observations, 20.7 sigma above the best",
        "40 of 48 samples are bad on the state before the onset, too: the worst has a loss of 10.24 (8 robust "
        "deviations above 1904 harmless ones), and by itself a gradient norm of 5.6; as many harmless ones are as bad "
        "in at most 0.01 % of draws. It extends 1 batches beyond the window and ends at position 1947",
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
def test_what_megastable_says_stays(text: str) -> None:
    assert redactor().text(text) == text


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
def test_what_others_say_is_withheld(text: str, shown: str) -> None:
    assert redactor().text(text) == shown


def test_names_can_be_kept() -> None:
    assert redactor(hosts=True).text("on node-4 and node-3") == "on node-4 and node-3"
    kept = redactor(names=True)
    assert kept.text("of acme mails on node-4") == "of acme mails on host-2"
    assert kept.tree({"shard": "acme-00000", "corpus": "another"}) == {
        "shard": "acme-00000",
        "corpus": "another",
    }


def test_a_name_that_megastable_uses_changes_no_sentence() -> None:
    names = PublicNames()
    collect([{"corpus": "data"}, {"host": "step"}], names)
    redact = Redactor(names)
    assert redact.text("cause: data at step 3") == "cause: data at step 3"
    assert redact.tree({"corpus": "data", "cause": "data"}) == {"corpus": "corpus-1", "cause": "data"}


def test_trees_keep_their_form() -> None:
    value = {
        "loss": 1.5,
        "applied": True,
        "none": None,
        "hunter2": [{"reason": "hunter2"}],
        "fingerprint": "ab" * 32,
    }
    assert redactor().tree(value) == {
        "loss": 1.5, "applied": True, "none": None, WITHHELD: [{"reason": WITHHELD}], "fingerprint": "ab" * 32,
    }  # fmt: skip


def test_values_that_json_does_not_have_are_texts() -> None:
    assert redactor().tree({"loss": b"hunter2", "step": {"hunter2"}}) == {
        "loss": f"b'{WITHHELD}'", "step": f"{{'{WITHHELD}'}}",
    }  # fmt: skip


def test_versions_and_devices() -> None:
    given = {
        "torch": "2.9.0+cu128",
        "device": "NVIDIA H100 80GB HBM3",
        "python": "3.11.7",
        "deepspeed": "0.18.2+mine",
    }
    shown = redactor().tree({"software": given})["software"]
    assert shown == given | {"deepspeed": WITHHELD}


@given(
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30), st.integers(0, 5)
)
def test_a_secret_is_withheld_whatever_is_around_it(around: str, where: int) -> None:
    secret = "Zq7vK2xW9pLm"
    text = around[:where] + " " + secret + " " + around[where:]
    assert secret not in redactor().text(text)
    assert secret not in redactor().text(around[:where] + secret + around[where:])
