"""The guard in real trainers: a run with two bad batches ends, bit for bit, as one without the guard that never had
them. Needs the extra `stacks`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megastable_guard import Guard, SkippableSampler
from tests.distributed import run_ranks

pytestmark = pytest.mark.slow
SIZE, BATCH, STEPS, FIRST, WORDS = 6000, 8, 150, 100, 64


class Sums(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Modular sums; the targets of bad samples are random, and weigh more."""

    def __init__(self, bad: Sequence[int]) -> None:
        self.bad = set(bad)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        inputs = torch.randint(0, WORDS, (4,), generator=draw)
        is_bad = index in self.bad
        target = torch.randint(0, WORDS, (), generator=draw) if is_bad else (inputs[0] + inputs[1]) % WORDS
        return inputs, target, torch.tensor(9.0 if is_bad else 1.0)


def write_text(index: int, bad: Sequence[int]) -> str:
    """A sequence that can be learnt, or noise."""
    draw = random.Random(index)
    words = [draw.randrange(WORDS) if index in bad else (index * 7 + 3 * n) % WORDS for n in range(24)]
    return " ".join(map(str, words))


Trained = tuple[list[Tensor], Guard | None]


def train_transformers(
    sampler: SkippableSampler,
    bad: Sequence[int],
    guarded: bool,
    folder: Path,
    trl: bool = False,
    ranks: int = 1,
) -> Trained:
    """By transformers' Trainer, or by TRL's SFTTrainer; as many micro-batches as the sampler's batch says."""
    datasets, transformers = pytest.importorskip("datasets"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tokenizers import Tokenizer, models, pre_tokenizers

    from megastable_guard.adapters.huggingface import GuardCallback

    words = Tokenizer(
        models.WordLevel({**{str(n): n for n in range(WORDS)}, "<eos>": WORDS, "<pad>": WORDS + 1}, "<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    shape = {
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "eos_token_id": WORDS,
        "bos_token_id": WORDS,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS + 2, **shape))
    options = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": sampler.batch // BATCH // ranks,
        "learning_rate": 3e-3, "report_to": [], "disable_tqdm": True, "save_steps": 60, "logging_strategy": "no",
        "use_cpu": True, "bf16": False,
    }  # fmt: skip
    texts = [write_text(index, bad) for index in range(SIZE)]
    if trl:
        sft = pytest.importorskip("trl")
        dataset = datasets.Dataset.from_dict({"text": texts})
        kind, arguments = sft.SFTTrainer, sft.SFTConfig(str(folder), max_length=32, **options)
    else:
        ids = [[int(word) for word in text.split()] for text in texts]
        dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")
        kind, arguments = transformers.Trainer, transformers.TrainingArguments(str(folder), **options)
    trainer = kind(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer._get_train_sampler = lambda *_: sampler
    callback = GuardCallback(trainer, sampler=sampler, interval=20, run_dir=folder) if guarded else None
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.global_step == trainer.lr_scheduler.last_epoch == STEPS
    return list(model.parameters()), callback.guard if callback else None


def train_trl(sampler: SkippableSampler, bad: Sequence[int], guarded: bool, folder: Path) -> Trained:
    return train_transformers(sampler, bad, guarded, folder, trl=True)


def train_lightning(sampler: SkippableSampler, bad: Sequence[int], guarded: bool, folder: Path) -> Trained:
    lightning = pytest.importorskip("lightning")
    from megastable_guard.adapters.lightning import LightningGuard

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Embedding(WORDS, 16),
                nn.Flatten(),
                nn.Linear(64, 32),
                nn.Dropout(0.1),
                nn.GELU(),
                nn.Linear(32, WORDS),
            )

        def training_step(self, batch: Any, number: int) -> Tensor:
            inputs, targets, weights = batch
            return (nn.functional.cross_entropy(self.net(inputs), targets, reduction="none") * weights).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Stop(lightning.Callback):  # type: ignore[misc, name-defined]
        """Lightning's own count has steps that were done again, too."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = callback is not None and callback.guard.step >= STEPS

    torch.manual_seed(0)
    module = Module()
    callback = LightningGuard(sampler, interval=20, run_dir=folder) if guarded else None
    trainer = lightning.Trainer(
        max_steps=2 * STEPS if guarded else STEPS,
        accumulate_grad_batches=sampler.batch // BATCH, gradient_clip_val=1.0,
        callbacks=[callback, Stop()] if callback else [], logger=False, default_root_dir=folder, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Sums(bad), batch_size=BATCH, sampler=sampler))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    return list(module.parameters()), callback.guard if callback else None


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("train", [train_transformers, train_trl, train_lightning])
def test_a_trainer_rewinds_to_the_bits_of_a_run_that_never_saw_the_data(
    train: Callable[..., Trained], accumulated: int, tmp_path: Path
) -> None:
    batch = BATCH * accumulated
    order = list(SkippableSampler(SIZE, batch, seed=1))
    bad = order[(FIRST - 1) * batch : (FIRST + 1) * batch]
    samplers = [SkippableSampler(SIZE, batch, seed=1, updates=2 * STEPS, after=10**6) for _ in range(2)]
    weights, guard = train(samplers[0], bad, True, tmp_path / "guarded")
    samplers[1].seek(0, 0, skip=bad)
    expected, _ = train(samplers[1], bad, False, tmp_path / "plain")
    assert guard is not None and guard.step == STEPS
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    lines = [json.loads(line) for line in (tmp_path / "guarded/journal.jsonl").read_text().splitlines()]
    refused = [line["step"] for line in lines if line["event"] == "discarded"]
    assert refused == [FIRST, FIRST + 1] and guard.report()["rewinds"] == 1
    assert (lines[0]["event"], lines[-1]["event"], lines[-1]["steps"]) == ("training", "finished", STEPS)


def train_under_ddp(bad: Sequence[int], guarded: bool, folder: Path) -> list[Tensor]:
    """By transformers' Trainer on this rank of two. The sampler yields the samples of both, as every rank reads all."""
    sampler = SkippableSampler(SIZE, 2 * BATCH, seed=1, updates=2 * STEPS, after=10**6)
    sampler.seek(0, 0, skip=() if guarded else bad)
    return [w.detach().clone() for w in train_transformers(sampler, bad, guarded, folder, ranks=2)[0]]


def test_a_trainer_rewinds_under_ddp(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    order = list(SkippableSampler(SIZE, 2 * BATCH, seed=1))
    bad = order[(FIRST - 1) * 2 * BATCH : (FIRST + 1) * 2 * BATCH]
    guarded, plain = (
        run_ranks(2, train_under_ddp, bad, is_guarded, tmp_path) for is_guarded in (True, False)
    )
    for one, other in zip([*guarded, guarded[0]], [*plain, guarded[1]], strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    assert (tmp_path / "journal.jsonl").read_text().count('"discarded"') == 2  # of the first rank alone
