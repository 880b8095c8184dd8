"""The guard around DeepSpeed engines on two ranks: refused updates change nothing, and a rewound run ends, bit for bit,
as one that never saw the data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable_guard.host_copies import local_part
from tests.distributed import run_ranks
from tests.guard.test_loop_guard import same

deepspeed = pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow
SIZE, BATCH, STEPS = 64, 16, 140
BURST = {100: 8.0, 101: 8.0}
KINDS = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero1_bf16": {
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
    },
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero2_bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True, "check_grad_overflow": False}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero3_bf16": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}, "bf16": {"enabled": True},
    },
}  # fmt: skip
WRAPPERS = {
    "fp32": "AdamW", "bf16": "FP16_UnfusedOptimizer", "zero1": "DeepSpeedZeroOptimizer", "zero1_bf16": "BF16_Optimizer",
    "zero2": "DeepSpeedZeroOptimizer", "zero2_bf16": "DeepSpeedZeroOptimizer",
    "zero3": "DeepSpeedZeroOptimizer_Stage3", "zero3_bf16": "DeepSpeedZeroOptimizer_Stage3",
}  # fmt: skip


class Engine:
    """A training of somebody's: two micro-batches to an update, two parameter groups, clipping, a schedule."""

    def __init__(self, kind: str, guarded: bool, **options: Any) -> None:
        from megastable_guard.adapters.deepspeed_engine import EngineGuard

        torch.manual_seed(7)
        data_type = torch.bfloat16 if "bf16" in kind else torch.float32
        model = nn.Sequential(
            nn.Embedding(SIZE, 16),
            nn.Flatten(),
            nn.Linear(64, 32),
            nn.BatchNorm1d(32, dtype=data_type),
            nn.Dropout(0.1),
            nn.GELU(),
            nn.Linear(32, SIZE),
        )
        biases = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        weights = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
        config = {
            "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
            "communication_data_type": "fp32", "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config | KINDS[kind]
        )
        assert type(self.engine.optimizer).__name__ == WRAPPERS[kind]
        self.guard = EngineGuard(self.engine, **options) if guarded else None
        self.order = list(range(1, 2 * STEPS))
        self.refused, self.rewound = list[int](), list[int]()
        self.seen = dict[int, list[float]]()  # loss and norm by step, when it was first made
        torch.manual_seed(11)

    def train(self, steps: int, bad: Mapping[int, float] = {}) -> Engine:
        step = self.guard.step if self.guard else 0
        while step < steps:
            number = self.order[step]
            before, mean_loss = self.read_state(), torch.zeros(())
            for micro in range(2):
                inputs, targets = self.read_batch(number, micro, bad)
                loss = nn.functional.cross_entropy(self.engine(inputs).float(), targets) * bad.get(number, 1)
                self.engine.backward(loss)
                self.engine.step()
                mean_loss += loss.detach() / 4  # of two micro-batches on two ranks
            step += 1
            dist.all_reduce(mean_loss)
            self.seen.setdefault(step, [float(mean_loss), float(self.engine.get_global_grad_norm() or 0.0)])
            if self.guard is None:
                continue
            verdict = self.guard.verdict
            assert verdict is not None and verdict.step == step
            assert verdict.apply == self.engine.was_step_applied()
            if verdict.rewind:
                self.rewound.append(step)
                step = self.guard.step
                late = {self.order[deferred - 1] for deferred in self.guard.deferred}
                self.order = [number for number in self.order if number not in late]
            elif not verdict.apply:
                assert same(before, self.read_state())
                self.refused.append(step)
        return self

    def read_batch(self, number: int, micro: int, bad: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        """This rank's part."""
        draw = torch.Generator().manual_seed(2 * number + micro)
        inputs = torch.randint(0, SIZE, (2 * BATCH, 4), generator=draw)
        targets = (inputs[:, 0] + inputs[:, 1]) % SIZE
        if number in bad:
            targets = torch.randint(0, SIZE, (2 * BATCH,), generator=draw)
        return inputs[dist.get_rank() :: 2], targets[dist.get_rank() :: 2]

    def read_state(self) -> list[Any]:
        """This rank's weights, fp32 parts, moments, buffers and schedule."""
        inner = self.engine.basic_optimizer
        masters = [parameter for group in inner.param_groups for parameter in group["params"]]
        masters = masters or self.engine.optimizer.fp32_partitioned_groups_flat
        moments = [value for master in masters for value in inner.state.get(master, {}).values()]
        parts = [local_part(parameter) for parameter in self.engine.module.parameters()]
        tensors = [*parts, *self.engine.module.buffers(), *masters, *moments]
        schedule = [self.engine.lr_scheduler.last_epoch, *(group["lr"] for group in inner.param_groups)]
        return [*(tensor.detach().clone() for tensor in tensors), *schedule]

    def read_ending(self) -> list[Any]:
        counters = [self.engine.global_steps, self.engine.global_samples, self.engine.skipped_steps]
        whole = [parameter.detach().clone() for parameter in self.engine.module.parameters()]  # or empty
        return [*self.read_state(), *whole, *counters, torch.get_rng_state()]

    def are_linked(self) -> bool:
        """Whether what DeepSpeed shows as moments of a parameter, as to its checkpoints, are those of the optimizer."""
        inner = self.engine.basic_optimizer
        present = {
            value.untyped_storage().data_ptr() for state in inner.state.values() for value in state.values()
        }
        mappings = (getattr(parameter, "_hp_mapping", None) for parameter in self.engine.module.parameters())
        fragments = [
            fragment for mapping in mappings if mapping for fragment in mapping.optim_fragment.values()
        ]
        return all(fragment.untyped_storage().data_ptr() in present for fragment in fragments)


def go_back(kind: str, folder: Path, interval: int = 20) -> tuple[bool, list[int], list[int]]:
    """Whether a run with a burst of bad data ends as one that never saw it; what was refused and rewound."""
    guarded = Engine(kind, True, interval=interval, run_dir=folder).train(101, BURST)
    if dist.get_rank() == 0:
        lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
        line = next(line for line in lines if line["event"] == "discarded")
        loss, norm = guarded.seen[100]
        assert line["loss"] == pytest.approx(loss, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm or line["grad_norm"], rel=1e-5)
        assert line["grad_norm"] > 2.0  # before clipping
    ending = guarded.train(STEPS, BURST).read_ending()
    assert guarded.are_linked()
    never = Engine(kind, False)
    never.order = [number for number in never.order if number not in BURST]
    return same(ending, never.train(STEPS).read_ending()), guarded.refused, guarded.rewound


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_is_rewound_to_the_bits_of_one_that_never_saw_the_data(kind: str, tmp_path: Path) -> None:
    assert run_ranks(2, go_back, kind, tmp_path) == [(True, [100], [101])] * 2


@pytest.mark.parametrize("kind", ["fp32", "zero1_bf16", "zero2"])
def test_an_engine_goes_back_to_where_the_optimizer_had_no_moments(kind: str, tmp_path: Path) -> None:
    assert run_ranks(2, go_back, kind, tmp_path, 10**6) == [(True, [100], [101])] * 2


def meet_infinity(kind: str) -> bool:
    """Whether a step without finite gradients is judged and refused, and nothing of the state changes."""
    training = Engine(kind, True).train(30)
    before = training.read_state()
    training.engine.module[2].weight.register_hook(lambda gradient: gradient * float("inf"))
    training.train(31)
    return training.refused == [31] and same(before, training.read_state())


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_never_applies_what_is_not_finite(kind: str) -> None:
    """DeepSpeed looks itself, but for fp32 without ZeRO."""
    assert run_ranks(2, meet_infinity, kind) == [True, True]


def resume(kind: str, folder: Path) -> tuple[bool, list[int], list[int]]:
    """A rewind before the kill and one after it, which goes back to copies of the second process."""
    burst = BURST | {160: 8.0, 161: 8.0}
    never = Engine(kind, False)
    never.order = [number for number in never.order if number not in burst]
    expected = never.train(STEPS + 40).read_ending()
    first = Engine(kind, True, interval=20).train(STEPS, burst)
    assert first.guard
    first.engine.save_checkpoint(str(folder), "end", save_latest=False)
    saved, random_state = json.dumps(first.guard.state_dict()), torch.get_rng_state()
    second = Engine(kind, True, interval=20)
    second.engine.load_checkpoint(str(folder), "end")
    assert second.guard
    second.guard.load_state_dict(json.loads(saved))
    second.order = first.order
    # DeepSpeed writes those of rank 0 alone.
    for kept, buffer in zip(first.engine.module.buffers(), second.engine.module.buffers(), strict=True):
        buffer.copy_(kept)
    torch.set_rng_state(random_state)
    ending = second.train(STEPS + 40, burst).read_ending()
    return same(ending, expected), first.rewound, second.rewound


@pytest.mark.parametrize("kind", ["zero1_bf16", "zero2"])
def test_an_engine_that_was_killed_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    assert run_ranks(2, resume, kind, tmp_path) == [(True, [101], [159])] * 2


def raise_in_a_step(folder: Path) -> list[int]:
    """How many parameters ZeRO 3's inner optimizer has before and after a step in which the guard raises."""
    training = Engine("zero3", True, run_dir=folder / "a file")
    assert training.guard
    groups, counts = training.guard.copies.optimizers[0].param_groups, list[int]()  # type: ignore[union-attr]
    counts.append(sum(len(group["params"]) for group in groups))
    with pytest.raises(OSError, match="the first rank cannot write there"):
        training.train(1)
    return [*counts, sum(len(group["params"]) for group in groups)]


def test_a_guard_that_raises_leaves_the_optimizer_of_zero_3_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    assert run_ranks(2, raise_in_a_step, tmp_path) == [[0, 0]] * 2


def refuse() -> list[str]:
    from megastable_guard.adapters.deepspeed_engine import EngineGuard

    answers = []
    for options in (
        {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
        {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}},
    ):
        model = nn.Linear(4, 4)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(model.parameters()),
            config={"train_micro_batch_size_per_gpu": 1, **options},
        )  # fmt: skip
        with pytest.raises(ValueError, match="EngineGuard does not cover fp16, offloading") as caught:
            EngineGuard(engine)
        answers.append(str(caught.value))
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    pipeline, *_ = deepspeed.initialize(
        model=deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss),
        optimizer=torch.optim.AdamW(nn.ModuleList(layers).parameters()),
        config={"train_micro_batch_size_per_gpu": 1},
    )
    with pytest.raises(ValueError, match="EngineGuard does not cover fp16, offloading"):
        EngineGuard(pipeline)
    training = Engine("zero2", True)
    with pytest.raises(ValueError, match="has a guard already"):
        EngineGuard(training.engine)
    training.engine.set_gradient_accumulation_boundary(True)
    training.engine(training.read_batch(1, 0, {})[0]).sum().backward()
    with pytest.raises(RuntimeError, match="has seen no loss"):
        training.engine.step()
    return answers


def test_what_the_guard_of_an_engine_does_not_cover_is_refused() -> None:
    assert len(run_ranks(1, refuse)[0]) == 2
