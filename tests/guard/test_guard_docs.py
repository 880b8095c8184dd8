"""docs/guard.md is true: every block of Python runs against the real packages, on data with two bad steps, and the
guard acts on them; and so does the example. Needs the extra `stacks`. Blocks of stacks beside our pins are run by
test_foreign_stacks.py."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastable.report.postmortem import write_incidents
from megastable_guard import SkippableSampler
from tests.distributed import run_ranks
from tests.guard.test_adapters import WORDS, write_text
from tests.guard.test_loop_guard import SIZE, Sums
from tests.guard.test_sample_examiner import Chain, choose_samples, write_samples
from tests.journal import events

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guard.md"
STEPS, FIRST, COUNT = 150, 100, 20_000  # updates, the first bad one, samples
ACTED = [("discarded", FIRST), ("discarded", FIRST + 1)]
FOREIGN = {"torchtitan", "OLMo-core", "Megatron-core and Megatron-LM"}  # of test_foreign_stacks.py


def read_blocks() -> dict[str, list[str]]:
    """The Python of every section, by its heading."""
    sections = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    blocks = {heading: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for heading, text in sections}
    return {heading: found for heading, found in blocks.items() if found}


def find_bad(batch: int) -> list[int]:
    return list(SkippableSampler(COUNT, batch))[(FIRST - 1) * batch : (FIRST + 1) * batch]


def make_sums(bad: Sequence[int]) -> Tensor:
    """Samples of `Sums`: [inputs, target, weight of the loss]."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randint(0, SIZE, (COUNT, 2), generator=draw)
    samples = torch.cat(
        [inputs, inputs.sum(1, keepdim=True) % SIZE, torch.ones(COUNT, 1, dtype=torch.long)], 1
    )
    samples[list(bad), 2] = torch.randint(0, SIZE, (len(bad),), generator=draw)
    samples[list(bad), 3] = 9
    return samples


def name_plain(run: Path, steps: int) -> dict[str, Any]:
    """What the block of a plain loop presupposes."""
    torch.manual_seed(1)
    model = Sums()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    return {
        "dataset": make_sums(find_bad(32)), "model": model, "optimizer": optimizer, "scheduler": scheduler,
        "steps": steps, "run": run,
    }  # fmt: skip


def told(run: Path) -> list[tuple[str, int]]:
    """What was refused."""
    return [(event.event, event["step"]) for event in events(run, "discarded")]


def check_run(run: Path) -> None:
    """Both bad updates were refused, the run went back once, and is complete."""
    assert told(run) == ACTED
    whats = [event["what"] for event in events(run, "incident")]
    assert whats.count("rewound") == 1 and whats[-1] == "closed"
    assert events(run)[-1].event == "finished" and events(run)[-1]["steps"] == STEPS


def test_every_block_is_run() -> None:
    """A section with Python has a test here."""
    tested = {
        "A plain loop", "DDP and FSDP", "Bad samples by name", "Several optimizers", "Accelerate", "DeepSpeed",
        "Hugging Face and TRL", "Lightning",
    }  # fmt: skip
    assert set(read_blocks()) == tested | FOREIGN
    assert all(len(blocks) == 1 for blocks in read_blocks().values())
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 460


def test_the_plain_loop_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends as one that was not interrupted."""
    (block,) = read_blocks()["A plain loop"]
    models = list[nn.Module]()
    for run, parts in ((tmp_path / "whole", [STEPS]), (tmp_path / "parts", [130, STEPS])):
        for steps in parts:
            names = name_plain(run, steps)
            exec(block, names)
        models.append(names["model"])
        check_run(run)
    assert [event["step"] for event in events(tmp_path / "parts", "training")] == [0, 120]
    assert f"{STEPS} steps, {STEPS} updates applied, 2 refused; 1 rewinds" in capsys.readouterr().out
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def run_behind_the_plain_loop(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    """The block of a section, behind the functions of the plain loop; all names. The optimizer has made the updates
    that the guard counts, and no others."""
    (plain,), (block,) = read_blocks()["A plain loop"], read_blocks()[heading]
    exec(plain[: plain.index("\nsampler = ")] + block, names)
    made_updates = {int(moments["step"]) for moments in names["optimizer"].state.values()}
    assert made_updates <= {names["guard"].updates}, made_updates
    return names


def are_equal(model: nn.Module) -> bool:
    """Whether the weights of both ranks are."""
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(both, weights)
    return torch.equal(*both)


def train_ddp(run: Path) -> bool:
    return are_equal(run_behind_the_plain_loop("DDP and FSDP", name_plain(run, STEPS))["model"])


def test_the_loop_under_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, train_ddp, tmp_path) == [True, True]
    check_run(tmp_path)


def test_the_loop_that_names_bad_samples(tmp_path: Path) -> None:
    """Exactly those: of an update that is refused alone, and of a burst that is rewound."""
    bad = [*choose_samples(0, [7], first=90), *choose_samples(0, [4, 4, 4])]
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = name_plain(tmp_path, STEPS) | {
        "model": model, "optimizer": optimizer, "dataset": write_samples(0, bad),
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS),
    }  # fmt: skip
    run_behind_the_plain_loop("Bad samples by name", names)
    assert names["sampler"].state_dict()["skipped"] == sorted(bad)
    report = names["guard"].report()
    assert (report["rewinds"], report["skipped_samples"], report["alerts"]) == (1, len(bad), 0)
    assert [case["cause"] for case in report["incidents"]] == ["data"]
    assert told(tmp_path)[0] == ("discarded", 90)


def test_the_guard_of_several_optimizers(tmp_path: Path) -> None:
    """Refused updates and a rewind reach both, and their schedules."""
    names = run_behind_the_plain_loop("Several optimizers", name_plain(tmp_path, STEPS))
    guard, model, optimizers, schedulers = (
        names[name] for name in ("guard", "model", "optimizers", "schedulers")
    )
    sampler = SkippableSampler(COUNT, batch=32, updates=2 * STEPS)
    batches = names["read_batches"](names["dataset"], sampler, 32)
    while guard.step < STEPS:
        loss = model(next(batches))
        loss.backward()
        verdict = guard.check(loss=loss.detach())
        if verdict.apply:
            for part in (*optimizers, *schedulers):
                part.step()
        elif verdict.rewind:
            sampler.seek(guard.rewind(), trained=verdict.step, defer=guard.deferred)
            assert {part.last_epoch for part in schedulers} == {guard.updates}
            batches = names["read_batches"](names["dataset"], sampler, 32)
        model.zero_grad()
    guard.finish_run(sampler)
    check_run(tmp_path)
    assert len(guard.copies.optimizers) == 2 and {part.last_epoch for part in schedulers} == {STEPS}


def train_accelerate(run: Path) -> bool:
    """The loader of every rank goes over the samples of all."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    names = name_plain(run, STEPS) | {"dataset": make_sums(find_bad(32))}
    run_behind_the_plain_loop("Accelerate", names)
    assert names["scheduler"].scheduler.last_epoch == 2 * STEPS  # Accelerate steps it once a rank
    return are_equal(names["model"])


def test_the_loop_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(2, train_accelerate, tmp_path) == [True, True]
    check_run(tmp_path)


def train_deepspeed(run: Path) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "steps_per_print": 10**9,
    }  # fmt: skip
    names = name_plain(run, STEPS) | {"config": config, "dist": torch.distributed}
    return are_equal(run_behind_the_plain_loop("DeepSpeed", names)["model"])


def test_the_loop_of_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    assert run_ranks(2, train_deepspeed, tmp_path) == [True, True]
    check_run(tmp_path)


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    (block,) = read_blocks()["Hugging Face and TRL"]
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "eos_token_id": 0, "bos_token_id": 0}
    count, bad = 4000, list(SkippableSampler(4000, 8))[(FIRST - 1) * 8 : (FIRST + 1) * 8]
    ids = [[int(word) for word in write_text(index, bad).split()] for index in range(count)]
    names = {
        "model": transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS + 2, **shape)),
        "dataset": datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch"),
        "steps": STEPS, "run": tmp_path, "SkippableSampler": SkippableSampler,
    }  # fmt: skip
    exec(block, names)
    check_run(tmp_path)


def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    (block,) = read_blocks()["Lightning"]

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Sums()

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss: Tensor = self.net(batch)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    torch.manual_seed(1)
    names = name_plain(tmp_path, STEPS) | {
        "module": Module(), "SkippableSampler": SkippableSampler, "DataLoader": torch.utils.data.DataLoader,
    }  # fmt: skip
    exec(block, names)
    check_run(tmp_path)


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted", ROOT / "guard/examples/trl_planted_batch.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_the_example_of_trl_leaves_a_postmortem(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    report = load_example().train_guarded(tmp_path).guard.report()
    assert (report["steps"], report["updates"], report["refused"], report["rewinds"]) == (150, 149, 1, 0)
    assert told(tmp_path) == [("discarded", 100)]
    (folder,) = write_incidents(tmp_path)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert (
        "At step 100 the loss went from" in page
        and "1 update refused: the weights never saw the data." in page
    )
    assert "data:image/png;base64" in page and "None" not in page
