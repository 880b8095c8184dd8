"""The guard of somebody else's loop: what is refused changes nothing, and a rewound run ends, bit for bit, as one that
never saw the data; plain, with DDP and with FSDP2 on two ranks."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megastable_guard import SkippableSampler
from megastable_guard.host_copies import HostCopies, find_inner_optimizer, local_part, read_forward_state
from megastable_guard.loop_guard import Guard
from tests.distributed import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SIZE, BATCH, STEPS = 64, 32, 160
BURST = {100: 8.0, 101: 8.0}  # factors of the loss of steps with random targets


class Loop:
    """A training of somebody's, which knows the guard by its four calls. wrap: makes the model parallel."""

    def __init__(
        self, guarded: bool, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, **options: Any
    ) -> None:
        torch.manual_seed(7)
        self.model = wrap(
            nn.Sequential(
                nn.Embedding(SIZE, 16),
                nn.Flatten(),
                nn.Linear(64, 32),
                nn.BatchNorm1d(32),
                nn.Dropout(0.1),
                nn.GELU(),
                nn.Linear(32, SIZE),
            )
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 2 * STEPS)
        self.guard = (
            Guard(self.model, self.optimizer, self.scheduler, interval=20, **options) if guarded else None
        )
        self.order = list(range(1, 2 * STEPS))
        self.refused, self.rewound = list[int](), list[int]()
        torch.manual_seed(11)

    def read_batch(self, number: int, bad: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        """This rank's part."""
        draw = torch.Generator().manual_seed(number)
        inputs = torch.randint(0, SIZE, (BATCH, 4), generator=draw)
        targets = (inputs[:, 0] + inputs[:, 1]) % SIZE
        if number in bad:
            targets = torch.randint(0, SIZE, (BATCH,), generator=draw)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return inputs[rank::world], targets[rank::world]

    def train(self, steps: int, bad: Mapping[int, float] = {}) -> Loop:
        """Up to `steps` updates, refused ones included."""
        step = self.guard.step if self.guard else 0
        while step < steps:
            number = self.order[step]
            inputs, targets = self.read_batch(number, bad)
            loss = nn.functional.cross_entropy(self.model(inputs), targets) * bad.get(number, 1.0)
            self.optimizer.zero_grad()
            loss.backward()
            step += 1
            if self.guard is not None:
                before = self.read_state(buffers=False)  # those go back to before the forward pass
                verdict = self.guard.check(loss=loss.detach())
                if not verdict.apply:
                    assert same(before, self.read_state(buffers=False))
                    (self.rewound if verdict.rewind else self.refused).append(step)
                if verdict.rewind:
                    step = self.guard.rewind()
                    late = {self.order[deferred - 1] for deferred in self.guard.deferred}
                    self.order = [number for number in self.order if number not in late]
                if not verdict.apply:
                    continue
            self.optimizer.step()
            self.scheduler.step()
        return self

    def read_state(self, buffers: bool = True) -> list[Any]:
        """This rank's weights, buffers, moments, schedule and random state."""
        tensors = [*self.model.parameters(), *(self.model.buffers() if buffers else [])]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        schedule = [self.scheduler.last_epoch, self.optimizer.param_groups[0]["lr"]]
        return [
            *(local_part(t).detach().clone() for t in (*tensors, *moments)),
            torch.get_rng_state(),
            *schedule,
        ]


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def as_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def as_fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model[2], model[-1]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(model)
    return model


def as_fsdp1(model: nn.Module, original: bool) -> nn.Module:
    """original: the optimizer sees the module's parameters, not the flat one."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))


def go_back(wrap: Callable[[nn.Module], nn.Module] | None = None) -> tuple[bool, list[int], list[int]]:
    """Whether a run with a burst of bad data ends as one that never saw it; what was refused and rewound."""
    options = {} if wrap is None else {"wrap": wrap}
    guarded = Loop(True, **options).train(STEPS, BURST)
    never = Loop(False, **options)
    never.order = [number for number in never.order if number not in BURST]
    never.train(STEPS)
    return same(guarded.read_state(), never.read_state()), guarded.refused, guarded.rewound


def test_guard_rewinds_to_the_bits_of_a_run_that_never_saw_the_data() -> None:
    assert go_back() == (True, [100], [101])


@pytest.mark.parametrize(
    ("wrap", "ranks"),
    [
        (as_ddp, 3),
        (as_fsdp, 2),
        (partial(as_fsdp1, original=True), 2),
        (partial(as_fsdp1, original=False), 2),
    ],
)
def test_guard_rewinds_on_several_ranks(wrap: Callable[[nn.Module], nn.Module], ranks: int) -> None:
    assert run_ranks(ranks, go_back, wrap) == [(True, [100], [101])] * ranks


def test_guard_refuses_a_single_batch_and_goes_on(tmp_path: Path) -> None:
    loop = Loop(True, run_dir=tmp_path).train(STEPS, {90: 30.0})
    assert (loop.refused, loop.rewound) == ([90], []) and loop.scheduler.last_epoch == STEPS - 1
    lines = map(json.loads, (tmp_path / "journal.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if line["event"] == "discarded"]
    assert line["step"] == 90 and "sigma" in line["reason"]


def test_guard_leaves_a_healthy_run_alone() -> None:
    loop = Loop(True).train(STEPS)
    assert (
        not loop.refused
        and not loop.rewound
        and same(loop.read_state(), Loop(False).train(STEPS).read_state())
    )


@pytest.mark.parametrize("killed", [50, 100, 101])
def test_guard_goes_on_where_a_checkpoint_was_written(killed: int) -> None:
    """Verdicts as without the kill; where copies are gone with the process, trouble from before it is not rewound."""
    whole, first, second = Loop(True), Loop(True).train(killed - 1, BURST), Loop(True)
    whole.train(STEPS, BURST)
    assert first.guard and second.guard
    for one in ("model", "optimizer", "scheduler"):
        getattr(second, one).load_state_dict(getattr(first, one).state_dict())
    second.guard.load_state_dict(json.loads(json.dumps(first.guard.state_dict())))
    second.train(STEPS, BURST)
    assert first.refused + second.refused == whole.refused == [100]
    assert second.rewound == ([] if killed == 101 else [101])


def test_guard_never_applies_what_is_not_finite() -> None:
    """Not even without copies to go back to: then it says that nothing in memory helps."""
    for keep in (0, 2):
        loop = Loop(True, keep=keep).train(60)
        assert loop.guard
        verdicts = [loop.guard.check(loss=float("nan"), grad_norm=1.0) for _ in range(3)]
        assert not any(verdict.apply for verdict in verdicts)
        assert verdicts[-1].rewind == (keep > 0) and verdicts[-1].stop == (keep == 0)


def test_rewind_without_a_verdict_is_refused() -> None:
    loop = Loop(True).train(3)
    with pytest.raises(RuntimeError, match="belongs behind a check"):
        assert loop.guard and loop.guard.rewind()


def test_hold_refused_stops_optimizer_and_scheduler_of_a_loop_that_calls_them_anyway() -> None:
    loop = Loop(True).train(60)
    assert loop.guard
    loop.guard.hold_refused(loop.scheduler)
    before = loop.read_state()
    verdict = loop.guard.check(loss=1e6, grad_norm=1e6)
    loop.optimizer.step()
    loop.scheduler.step()
    assert not verdict.apply and same(before, loop.read_state())
    torch.save(
        [loop.optimizer.state_dict(), loop.scheduler.state_dict()], io.BytesIO()
    )  # as every trainer does


def test_find_inner_optimizer_looks_into_wrappers() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert find_inner_optimizer(Wrapper(Wrapper(inner))) is inner
    with pytest.raises(TypeError, match="object is not an optimizer of torch and wraps none"):
        find_inner_optimizer(object())


def test_a_refused_update_leaves_no_trace_in_the_buffers() -> None:
    loop = Loop(True).train(60)
    assert loop.guard
    before, weight = [buffer.clone() for buffer in loop.model.buffers()], loop.model[0].weight  # type: ignore[index]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        loss = loop.model(loop.read_batch(61, {})[0]).sum()
        weight.copy_(kept)
    assert any(buffer.isnan().any() for buffer in loop.model.buffers())
    assert not loop.guard.check(loss=loss, grad_norm=1.0).apply
    assert same(before, list(loop.model.buffers()))


def test_guard_alerts_where_nothing_in_memory_helps(tmp_path: Path) -> None:
    """What is finite is applied then, with a warning and a line of the journal, once."""
    loop = Loop(True, run_dir=tmp_path, keep=0).train(80)
    assert loop.guard
    with pytest.warns(UserWarning, match="megastable guard, step 8"):
        verdicts = [loop.guard.check(loss=9.0, grad_norm=50.0) for _ in range(8)]
    assert verdicts[-1].apply and any(verdict.alert for verdict in verdicts)
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert "alert" in events


def test_load_state_dict_forgets_the_copies_of_another_timeline() -> None:
    loop = Loop(True).train(60)
    assert loop.guard and loop.guard.copies and loop.guard.copies.steps
    loop.guard.load_state_dict(loop.guard.state_dict())
    assert not loop.guard.copies.steps


def test_guard_refuses_a_step_without_a_loss() -> None:
    loop = Loop(True)
    assert loop.guard
    with pytest.raises(ValueError, match="the weights of all ranks are 0"):
        loop.guard._average_over_ranks(1.0, 1.0, 0.0, (False, False, False))


def test_copies_hold_parameters_of_the_optimizer_alone_and_share_the_model() -> None:
    """The fp32 weights beside those of a model in bf16 are restored; a schedule that refers to the model still does."""

    class Schedule:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.asked = model, 0

        def __call__(self, step: int) -> float:
            self.asked += 1
            return 1.0

    model, extra = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([*model.parameters(), extra])
    schedule = Schedule(model)
    copies = HostCopies(
        model, optimizer, {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)}, 1, 2
    )
    copies.take_copy(0, read_forward_state(model))
    asked, schedule.asked = schedule.asked, 9
    with torch.no_grad():
        extra.fill_(5.0)
    assert copies.restore_before(1).others["scheduler"]["lr_lambdas"][0]["model"] is model
    assert not extra.any() and schedule.model is model and schedule.asked == asked


class Sums(nn.Module):
    """The model of the README's loop: returns its loss. Samples are [inputs, target, weight of the loss]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(SIZE, 16),
            nn.Flatten(),
            nn.Linear(32, 32),
            nn.Dropout(0.1),
            nn.GELU(),
            nn.Linear(32, SIZE),
        )

    def forward(self, batch: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(self.net(batch[:, :2]), batch[:, 2], reduction="none")
        return (losses * batch[:, 3]).mean()


def run_readme(
    folder: Path, bad: Sequence[int], skipped: Sequence[int]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The loop of guard/README.md as it is written. skipped: samples that its sampler leaves out from the beginning."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "guard/README.md").read_text(), re.S)
    draw = torch.Generator().manual_seed(3)
    samples = torch.randint(0, SIZE, (20_000, 2), generator=draw)
    samples = torch.cat(
        [samples, samples.sum(1, keepdim=True) % SIZE, torch.ones(20_000, 1, dtype=torch.long)], 1
    )
    samples[list(bad), 2] = torch.randint(0, SIZE, (len(bad),), generator=draw)
    samples[list(bad), 3] = 9
    torch.manual_seed(1)
    model = Sums()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    names: dict[str, Any] = {
        "torch": torch, "DataLoader": DataLoader, "dataset": samples, "model": model, "optimizer": optimizer,
        "scheduler": scheduler, "steps": 150,
    }  # fmt: skip
    after_sampler = "\nsampler.seek(0, trained=0, skip=skipped)\n# With"
    # A longer stream, at whose end deferred samples would be read.
    code = code.replace("runs/mine", str(folder)).replace("updates=steps", "updates=300")
    code = code.replace("\n# With", after_sampler)
    exec(code, names | {"skipped": skipped})
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return list(model.parameters()), [line for line in lines if line["event"] in ("discarded", "incident")]


def test_the_loop_of_the_readme_ends_as_one_that_never_saw_the_data(tmp_path: Path) -> None:
    """With a loader, dropout and clipping."""
    order = list(SkippableSampler(20_000, 64))
    bad = order[99 * 64 : 101 * 64]
    weights, lines = run_readme(tmp_path / "one", bad, [])
    expected, no_lines = run_readme(tmp_path / "other", bad, bad)
    told = [(line.get("what", line["event"]), line["step"]) for line in lines]
    assert told[:5] == [
        ("discarded", 100),
        ("opened", 100),
        ("discarded", 101),
        ("opened", 101),
        ("rewound", 101),
    ]
    assert not no_lines and same(weights, expected)
