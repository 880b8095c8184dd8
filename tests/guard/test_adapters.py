"""The guard in real trainers: a run with two bad batches ends, bit for bit, as one without the guard that never had
them. Needs the extra `stacks`."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megastable_guard import Guard, SkippableSampler
from megastable_guard.host_copies import local_part
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
    stops: Sequence[int] = (),
    deepspeed: Mapping[str, Any] | None = None,
    names: bool = False,
    workers: int = 0,
) -> Trained:
    """By transformers' Trainer, or by TRL's SFTTrainer; as many micro-batches as the sampler's batch says. stops: steps
    at which a trainer ends, and another resumes from its last checkpoint; names: the guard names bad samples."""
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
    shape = {
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "eos_token_id": WORDS,
        "bos_token_id": WORDS,
    }
    options = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": sampler.batch // BATCH // ranks,
        "learning_rate": 3e-3, "report_to": [], "disable_tqdm": True, "save_steps": 20, "logging_strategy": "no",
        "use_cpu": True, "bf16": False, "dataloader_num_workers": workers,
    }  # fmt: skip
    if deepspeed is not None:
        options |= {"deepspeed": dict(deepspeed), "bf16": "bf16" in deepspeed}
    texts = [write_text(index, bad) for index in range(SIZE)]
    if trl:
        sft = pytest.importorskip("trl")
        dataset = datasets.Dataset.from_dict({"text": texts})
        kind, make_arguments = sft.SFTTrainer, partial(sft.SFTConfig, max_length=32)
    else:
        ids = [[int(word) for word in text.split()] for text in texts]
        dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")
        kind, make_arguments = transformers.Trainer, transformers.TrainingArguments

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    for start, stop in enumerate([*stops, STEPS]):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS + 2, **shape))
        trainer = kind(
            model=model,
            args=make_arguments(str(folder), **options),
            train_dataset=dataset,
            processing_class=tokenizer,
        )
        own_sampler = copy.deepcopy(sampler)
        trainer._get_train_sampler = lambda *_, own=own_sampler: own
        callback = (
            GuardCallback(trainer, sampler=own_sampler, names=names, interval=20, run_dir=folder)
            if guarded
            else None
        )
        trainer.add_callback(Stop())
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=start > 0)
        assert trainer.state.global_step == stop
    assert trainer.lr_scheduler.last_epoch == (callback.guard.updates if callback else STEPS)
    return list(model.parameters()), callback.guard if callback else None


def train_trl(sampler: SkippableSampler, bad: Sequence[int], guarded: bool, folder: Path) -> Trained:
    return train_transformers(sampler, bad, guarded, folder, trl=True)


def train_lightning(
    sampler: SkippableSampler,
    bad: Sequence[int],
    guarded: bool,
    folder: Path,
    stops: Sequence[int] = (),
    ranks: int = 1,
    dropout: float = 0.1,
    names: bool = False,
) -> Trained:
    """stops: steps at which a trainer ends, and another resumes from its last checkpoint."""
    lightning = pytest.importorskip("lightning")
    from megastable_guard.adapters.lightning import LightningGuard

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.begun = self.logged = 0
            self.net = nn.Sequential(
                nn.Embedding(WORDS, 16),
                nn.Flatten(),
                nn.Linear(64, 32),
                nn.Dropout(dropout),
                nn.GELU(),
                nn.Linear(32, WORDS),
            )

        def training_step(self, batch: Any, number: int) -> Tensor:
            inputs, targets, weights = batch
            loss = (nn.functional.cross_entropy(self.net(inputs), targets, reduction="none") * weights).mean()
            self.log("loss", loss)
            return loss

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            self.begun += 1

        def log(self, *given: Any, **named: Any) -> None:
            self.logged += 1
            super().log(*given, **named)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Stop(lightning.Callback):  # type: ignore[misc, name-defined]
        """Lightning's own count has steps that were done again, too."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = callback is not None and callback.guard.step >= stop

    for stop in [*stops, STEPS]:  # noqa: B007  # which Stop reads
        torch.manual_seed(0)
        module, own_sampler = Module(), copy.deepcopy(sampler)
        callback = LightningGuard(own_sampler, names, interval=20, run_dir=folder) if guarded else None
        checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
            folder, every_n_train_steps=20, save_top_k=-1
        )
        trainer = lightning.Trainer(
            max_steps=2 * STEPS if guarded else STEPS, strategy="ddp" if ranks > 1 else "auto", devices=ranks,
            accumulate_grad_batches=sampler.batch // BATCH // ranks, gradient_clip_val=1.0,
            callbacks=[callback, Stop(), checkpoints] if callback else [], logger=False, default_root_dir=folder,
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        written = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
        loader = DataLoader(Sums(bad), batch_size=BATCH, sampler=own_sampler)
        trainer.fit(module, loader, ckpt_path=written[-1] if written else None)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    assert module.logged == module.begun > 0  # nothing of samples that were only measured
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


def find_scattered(order: Sequence[int], batch: int, count: int = 5) -> list[int]:
    """Some samples of three batches from step FIRST on."""
    return [order[(FIRST - 1 + n) * batch + (5 * i + n) % batch] for n in range(3) for i in range(count)]


def train_naming(
    bad: Sequence[int], guarded: bool, folder: Path, stack: str, after: int = 10**6, **options: Any
) -> list[Tensor]:
    """On this rank; a guarded run is killed once before the trouble."""
    batch, is_lightning, ranks = 2 * BATCH, stack == "lightning", options.get("ranks", 1)
    own_part = {"rank": dist.get_rank(), "ranks": ranks} if is_lightning else {}
    sampler = SkippableSampler(
        SIZE, batch // own_part.get("ranks", 1), seed=1, updates=2 * STEPS, after=after, **own_part
    )
    sampler.seek(0, 0, skip=() if guarded else bad)
    options["stops"] = (50,) if guarded else ()
    if is_lightning:
        weights, _ = train_lightning(sampler, bad, guarded, folder, names=True, dropout=0.0, **options)
    else:
        weights, _ = train_transformers(
            sampler, bad, guarded, folder, trl=stack == "trl", names=True, **options
        )
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stack", ["transformers", "trl", "lightning"])
def test_a_trainer_skips_the_bad_samples_of_its_batches_and_no_others(
    stack: str, ranks: int, tmp_path: Path
) -> None:
    """5 of 16 in each of three steps, the last of which was not read yet."""
    pytest.importorskip(stack)
    order = list(SkippableSampler(SIZE, 2 * BATCH, seed=1))
    bad = [order[(FIRST - 1 + n) * 2 * BATCH + 3 * i + n] for n in range(3) for i in range(5)]
    guarded, plain = (
        run_ranks(ranks, partial(train_naming, ranks=ranks), bad, is_guarded, tmp_path / name, stack)
        for name, is_guarded in (("guarded", True), ("plain", False))
    )
    report = json.loads((tmp_path / "guarded/summary.json").read_text())
    assert (report["rewinds"], report["updates"], report["skipped_samples"]) == (1, STEPS, len(bad))
    for weights, expected in zip(guarded, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def test_an_update_that_is_refused_alone_gives_its_good_samples_back_past_what_workers_have_fetched(
    tmp_path: Path,
) -> None:
    pytest.importorskip("accelerate")
    bad = list(SkippableSampler(SIZE, 2 * BATCH, seed=1))[(FIRST - 1) * 2 * BATCH :][:8]
    weights = []
    for workers in (0, 2):
        train = partial(train_naming, after=160, workers=workers)
        weights.append(run_ranks(1, train, bad, True, tmp_path / str(workers), "transformers")[0])
        report = json.loads((tmp_path / str(workers) / "summary.json").read_text())
        assert (report["refused"], report["rewinds"], report["updates"]) == (1, 0, STEPS - 1)
        assert (report["skipped_samples"], report["deferred_samples"]) == (len(bad), 0)
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


LATER = [100, 101, 123, 124, 140, 141]  # the trouble of runs that end at STOPS
STOPS = (110, 130)
ZERO2 = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
STACKS: dict[str, dict[str, Any]] = {
    "alone": {},
    "ddp": {"ranks": 2},
    "zero0": {"ranks": 2, "deepspeed": ZERO2 | {"zero_optimization": {"stage": 0}}},
    "zero1_bf16": {
        "ranks": 2,
        "deepspeed": ZERO2
        | {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "communication_data_type": "fp32"},
    },
    "zero3": {
        "ranks": 2,
        "deepspeed": ZERO2 | {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}},
    },
    "zero2": {"ranks": 2, "deepspeed": ZERO2 | {"gradient_clipping": 1.0}},
}


def train_on_ranks(
    stack: str, guarded: bool, folder: Path, stops: Sequence[int], accumulated: int
) -> list[Tensor]:
    """By transformers' Trainer on this rank. The sampler yields the samples of all, as every rank reads all."""
    options = STACKS[stack]
    batch = options.get("ranks", 1) * BATCH * accumulated
    order = list(SkippableSampler(SIZE, batch, seed=1))
    bad = [index for step in LATER for index in order[(step - 1) * batch : step * batch]]
    sampler = SkippableSampler(SIZE, batch, seed=1, updates=2 * STEPS, after=10**6)
    sampler.seek(0, 0, skip=() if guarded else bad)
    weights, _ = train_transformers(sampler, bad, guarded, folder, stops=stops, **options)
    return [local_part(weight).detach().clone() for weight in weights]


@pytest.mark.parametrize(
    ("stack", "accumulated"),
    [("alone", 1), ("ddp", 2), ("zero0", 1), ("zero1_bf16", 2), ("zero2", 1), ("zero3", 2)],
)
def test_a_trainer_that_is_killed_twice_ends_as_one_that_never_saw_the_data(
    stack: str, accumulated: int, tmp_path: Path
) -> None:
    """Three times trouble: before, between and behind the ends of its processes."""
    pytest.importorskip("accelerate")
    if "deepspeed" in STACKS[stack]:
        pytest.importorskip("deepspeed")
    ranks = STACKS[stack].get("ranks", 1)
    guarded, plain = (
        run_ranks(ranks, train_on_ranks, stack, is_guarded, tmp_path / name, stops, accumulated)
        for name, is_guarded, stops in (("guarded", True, STOPS), ("plain", False, ()))
    )
    for weights, expected in zip(guarded, plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
    # Of the first rank alone.
    lines = [json.loads(line) for line in (tmp_path / "guarded/journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("what") == "rewound"] == [101, 122, 137]


def train_lightning_on_ranks(guarded: bool, folder: Path, stops: Sequence[int]) -> list[Tensor]:
    """On this rank of two, with two micro-batches. Without dropout: Lightning restores no random states."""
    order = list(SkippableSampler(SIZE, 4 * BATCH, seed=1))
    bad = [index for step in LATER for index in order[(step - 1) * 4 * BATCH : step * 4 * BATCH]]
    rank = dist.get_rank()
    sampler = SkippableSampler(SIZE, 2 * BATCH, seed=1, updates=2 * STEPS, after=10**6, rank=rank, ranks=2)
    sampler.seek(0, 0, skip=() if guarded else bad)
    weights, _ = train_lightning(sampler, bad, guarded, folder, stops, ranks=2, dropout=0.0)
    return [weight.detach().clone() for weight in weights]


def test_lightning_is_killed_twice_and_ends_as_one_that_never_saw_the_data(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    guarded = run_ranks(2, train_lightning_on_ranks, True, tmp_path / "guarded", STOPS)
    plain = run_ranks(2, train_lightning_on_ranks, False, tmp_path / "plain", ())
    for weights in guarded:
        assert all(torch.equal(one, other) for one, other in zip(weights, plain[0], strict=True))
    lines = [json.loads(line) for line in (tmp_path / "guarded/journal.jsonl").read_text().splitlines()]
    # The last checkpoint is from before the second trouble, which the next process meets, too.
    assert [line["step"] for line in lines if line.get("what") == "rewound"] == [101, 122, 122, 137]


class Net(nn.Module):
    """The smallest model that Hugging Face's Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": self.linear(inputs).square().mean()}


def make_trainer(folder: Path, steps: int = 5) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = {"max_steps": steps, "report_to": [], "disable_tqdm": True, "use_cpu": True, "save_steps": 5}
    arguments = transformers.TrainingArguments(str(folder), **options)
    return transformers.Trainer(model=Net(), args=arguments, train_dataset=[{"inputs": torch.ones(3)}] * 99)


def test_a_trainer_trains_on_after_a_run_whose_last_update_was_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    from transformers import TrainerCallback

    from megastable_guard.adapters.huggingface import GuardCallback

    class Poison(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 4:
                guard.loss = torch.tensor(float("nan"))

    guard = GuardCallback(trainer)
    trainer.add_callback(guard)
    trainer.add_callback(Poison())
    trainer.train()
    assert guard.guard.updates == 4
    trainer.remove_callback(Poison)
    weights = trainer.model.linear.weight.detach().clone()
    trainer.train()
    assert guard.guard.updates == 5 and not torch.equal(weights, trainer.model.linear.weight)


def test_what_a_trainer_notes_while_samples_are_measured_is_forgotten(tmp_path: Path) -> None:
    """As TRL's trainers do in `compute_loss`."""
    trainer = make_trainer(tmp_path)
    from megastable_guard.adapters.huggingface import GuardCallback

    def compute_loss(own: Any, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        loss: Tensor = model(**inputs)["loss"]
        own._total_train_tokens += 3
        own._metrics["train"]["entropy"].append(loss.item())
        own.log({"loss": loss.item()})
        return loss

    kind = type(trainer)
    trainer.__class__ = type("Noting", (kind,), {"compute_loss": compute_loss})
    trainer._total_train_tokens, trainer._metrics = 0, {"train": {"entropy": []}}
    callback = GuardCallback(trainer)
    trainer.add_callback(callback)
    trainer.train()
    before = copy.deepcopy([trainer._total_train_tokens, trainer._metrics, trainer.state.log_history])
    weight, bias = (part.detach() for part in trainer.model.linear.parameters())
    assert torch.allclose(callback._measure(7).detach(), (weight.sum() + bias).square())
    assert [trainer._total_train_tokens, trainer._metrics, trainer.state.log_history] == before
    assert before[0] == 15


def test_a_trainer_does_not_resume_from_a_checkpoint_that_knows_no_guard(tmp_path: Path) -> None:
    make_trainer(tmp_path).train()
    trainer = make_trainer(tmp_path, 9)
    from megastable_guard.adapters.huggingface import GuardCallback

    trainer.add_callback(GuardCallback(trainer))
    with pytest.raises(RuntimeError, match="the checkpoint was written without a guard"):
        trainer.train(resume_from_checkpoint=True)
