"""docs/guard.md is true: every block of Python runs against the real packages, on data with two bad steps, and the
guard acts on them; and so does the example. Needs the extra `stacks`."""

from __future__ import annotations

import importlib.util
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
from tests.journal import events

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guard.md"
STEPS, FIRST, COUNT = 150, 100, 20_000  # updates, the first bad one, samples
ACTED = [("discarded", FIRST), ("discarded", FIRST + 1)]


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
    assert set(read_blocks()) == {"A plain loop", "DDP and FSDP2", "Hugging Face Trainer", "Lightning"}
    assert all(len(blocks) == 1 for blocks in read_blocks().values())
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 300


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


def train_ddp(run: Path) -> bool:
    """The block of DDP, behind the loop of its page; whether the weights of both ranks are equal."""
    (plain,), (block,) = read_blocks()["A plain loop"], read_blocks()["DDP and FSDP2"]
    names = name_plain(run, STEPS)
    exec(plain[: plain.index("\nsampler = ")] + block, names)
    weights = torch.cat([weight.detach().flatten() for weight in names["model"].parameters()])
    both = [torch.empty_like(weights) for _ in range(2)]
    torch.distributed.all_gather(both, weights)
    return torch.equal(*both)


def test_the_loop_under_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, train_ddp, tmp_path) == [True, True]
    check_run(tmp_path)


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    (block,) = read_blocks()["Hugging Face Trainer"]
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
