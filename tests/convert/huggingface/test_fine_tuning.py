"""Fine-tuning programs see the end of a text as the one token that it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megastable.data.tokenizer import load_tokenizer
from megastable_tools.convert.huggingface.export import to_hf
from tests.convert.huggingface.clients import documented
from tests.convert.huggingface.conftest import MODELS, Make


@pytest.fixture
def exported(make: Make, tmp_path: Path) -> Path:
    """As the quickstart's checkpoint becomes."""
    return to_hf(make(MODELS["qwen3"]), tmp_path / "exported").out


def test_trl_fine_tunes_a_step_with_the_end_of_each_text(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl", reason="pip install trl")
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    names: dict[str, Any] = {}
    exec(documented("python", "SFTTrainer"), names)
    (batch,) = names["trainer"].get_train_dataloader()
    tokenizer = load_tokenizer(exported)
    rows = names["rows"]["text"]
    wanted = {(*tokenizer.encode(text), tokenizer.eod) for text in rows}
    kept = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), batch["labels"].tolist())
    seen = set()
    for ids, mask, labels in kept:
        length = sum(mask)
        assert labels == ids[:length] + [-100] * (len(ids) - length)  # the end is learned, padding is not
        assert set(ids[length:]) <= {0}
        seen.add(tuple(ids[:length]))
    assert seen == wanted and len(rows) == 2
    assert names["trainer"].state.global_step == 1
    assert load_tokenizer(tmp_path / "tuned").encode(rows[0]) == tokenizer.encode(rows[0])


def test_the_batch_of_a_fine_tuning_program(exported: Path, tmp_path: Path) -> None:
    """What TRL does with texts, by transformers alone."""
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    ours = load_tokenizer(exported)
    for folder in (exported, tmp_path / "again"):
        auto = AutoTokenizer.from_pretrained(folder if folder.exists() else exported)
        if not folder.exists():  # as it is saved after training
            auto.save_pretrained(folder)
            shutil.copy(exported / "config.json", folder)
            auto = AutoTokenizer.from_pretrained(folder)
        rows = [auto(text + auto.eos_token) for text in ("def f(x):", "    return x + 1\n")]
        assert [row["input_ids"][-1] for row in rows] == [ours.eod, ours.eod] == [2, 2]
        batch = DataCollatorForLanguageModeling(auto, mlm=False)(rows)
        # That collator masks what is the padding's id: the end must not be.
        assert (batch["labels"] == ours.eod).sum() == 2
        assert (batch["labels"] == -100).sum() == (batch["attention_mask"] == 0).sum() > 0
