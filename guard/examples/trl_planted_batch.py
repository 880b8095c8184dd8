"""A fine-tuning by TRL's SFTTrainer in which one batch is garbage: the guard refuses its update, and leaves a run
directory from which megastable makes a post-mortem.

    python guard/examples/trl_planted_batch.py runs/planted
    python -m megastable.report.postmortem runs/planted     # writes runs/planted/incidents/0001/report.html

Needs trl, and no GPU: the model is a small one, made here. It takes a minute.
"""

from __future__ import annotations

import base64
import random
import string
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from megastable_guard import SkippableSampler
from megastable_guard.adapters.huggingface import GuardCallback

SIZE, BATCH, STEPS, PLANTED = (
    2000,
    8,
    150,
    100,
)  # texts, texts of an update, updates, the update that gets garbage
WHO, DOES, WHAT = (
    ("the fox", "a child", "my aunt", "the baker"),
    ("sees", "likes", "paints"),
    ("a boat", "the hill"),
)


def make_texts(garbage: set[int]) -> list[str]:
    """Simple sentences; at some places what a broken extraction leaves: a file in base64."""
    draw = random.Random(1)
    texts = [
        ". ".join(f"{draw.choice(WHO)} {draw.choice(DOES)} {draw.choice(WHAT)}" for _ in range(3))
        for _ in range(SIZE)
    ]
    for place in garbage:
        texts[place] = base64.b64encode(draw.randbytes(45)).decode()
    return texts


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every character."""
    characters = string.ascii_letters + string.digits + " .+/="
    words = {token: number for number, token in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


class GuardedTrainer(SFTTrainer):
    """Reads the data in the order of a sampler that can go back."""

    def __init__(self, sampler: SkippableSampler, **options: Any) -> None:
        self.sampler = sampler
        super().__init__(**options)

    def _get_train_sampler(self, *_: Any) -> SkippableSampler:
        return self.sampler


def train_guarded(run: Path) -> GuardCallback:
    torch.manual_seed(1)
    sampler = SkippableSampler(SIZE, BATCH, updates=2 * STEPS)
    garbage = set(list(sampler)[(PLANTED - 1) * BATCH : PLANTED * BATCH])
    tokenizer, sampler = make_tokenizer(), SkippableSampler(SIZE, BATCH, updates=2 * STEPS)
    model_shape = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=2)
    trainer = GuardedTrainer(
        sampler,
        model=GPT2LMHeadModel(model_shape),
        args=SFTConfig(
            str(run / "checkpoints"), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=3e-3,
            max_length=64, report_to=[], save_strategy="no", logging_steps=50, bf16=False,
        ),
        train_dataset=Dataset.from_dict({"text": make_texts(garbage)}),
        processing_class=tokenizer,
    )  # fmt: skip
    guard_callback = GuardCallback(trainer, sampler=sampler, run_dir=run)
    trainer.add_callback(guard_callback)
    trainer.train()
    return guard_callback


if __name__ == "__main__":
    print(train_guarded(Path(sys.argv[1])).guard.report())
