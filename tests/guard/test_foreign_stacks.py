"""The guard in torchtitan, OLMo-core, Megatron-LM and nanochat: a run with two bad batches ends, bit for bit, as one
without the guard that never had them; a refused update changes nothing; a killed run goes on. The guard is put in by
the blocks of docs/guard.md.

None of these packages is in the extra `stacks`, as their pins are not ours. Install them beside a CPU build of torch:

    pip install torch==2.13.0 && pip install --no-deps torchtitan ai2-olmo-core megatron-core==0.16.1

and what their imports then miss. NANOCHAT and MEGATRON_LM name checkouts of these. In places they look for a device of
CUDA: these look-ups are replaced here, never in the adapters.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megastable_guard import Guard, SkippableSampler
from megastable_guard.actions import Decision, Signals
from megastable_guard.host_copies import local_part
from tests.distributed import run_ranks

pytestmark = pytest.mark.slow
SIZE, BATCH, LENGTH, STEPS, FIRST, WORDS = 6000, 16, 16, 150, 100, 64
PAGE = Path(__file__).resolve().parents[2] / "docs/guard.md"


def read_block(heading: str) -> str:
    """The Python of a section of docs/guard.md."""
    _, section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")
    (block,) = re.findall(r"^```py(?:thon)?\n(.*?)^```", section.split("\n## ")[0], re.M | re.S)
    return str(block)


def need(package: str) -> None:
    """Skips the test; the package itself is imported by the ranks."""
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")


def find_samples(first: int, last: int) -> list[int]:
    """Of the steps from first to last."""
    return list(SkippableSampler(SIZE, BATCH, seed=1))[(first - 1) * BATCH : last * BATCH]


def find_bad() -> list[int]:
    return find_samples(FIRST, FIRST + 1)


def write_tokens(index: int, bad: Sequence[int]) -> list[int]:
    """A sequence that can be learnt, or noise."""
    draw = torch.Generator().manual_seed(index)
    if index in bad:
        return torch.randint(0, WORDS, (LENGTH + 1,), generator=draw).tolist()
    return [(index * 7 + 3 * place) % WORDS for place in range(LENGTH + 1)]


def build_sampler(skipped: Sequence[int]) -> SkippableSampler:
    """The samples of this rank, without those that are skipped from the beginning."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sampler = SkippableSampler(
        SIZE, BATCH // ranks, seed=1, updates=2 * STEPS, rank=rank, ranks=ranks, after=10**6
    )
    sampler.seek(0, 0, skip=skipped)
    return sampler


def read_batches(sampler: SkippableSampler, bad: Sequence[int], samples: int) -> Iterator[Tensor]:
    """Tokens of micro-batches, one more than inputs: [samples, LENGTH + 1]."""
    indices = iter(sampler)
    while True:
        yield torch.tensor([write_tokens(next(indices), bad) for _ in range(samples)])


def read_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Tensor]:
    """Copies of this rank's weights, buffers, moments and random state."""
    moments = [value for inner in optimizers for state in inner.state.values() for value in state.values()]
    buffers = [buffer for _, buffer in model.named_buffers()]  # Megatron's DDP has other `buffers`
    tensors = [*model.parameters(), *buffers, *(moment for moment in moments if isinstance(moment, Tensor))]
    return [*(local_part(tensor).detach().clone() for tensor in tensors), torch.get_rng_state()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def read_events(folder: Path) -> list[tuple[str, int]]:
    """Updates that were refused alone, and those at which the run went back."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    rewound = [line["step"] for line in lines if line.get("what") == "rewound"]
    told = [(line.get("what", line["event"]), line["step"]) for line in lines]
    return [
        (event, step)
        for event, step in told
        if event == "rewound" or (event == "discarded" and step not in rewound)
    ]


def watch_refused(
    guard: Guard, owner: Any, name: str, read: Callable[[], list[Tensor]], refused: list[int]
) -> None:
    """Asserts of every refused update that it changed nothing, and notes its step; and of the first loss that the guard
    sees that it is the mean of a model that knows nothing. name: of the method that judges."""
    judge, judge_step = getattr(owner, name), guard.judge.judge_step

    def look(signals: Signals, oldest: int | None) -> Decision:
        assert signals.step > 1 or abs(signals.loss - math.log(WORDS)) < 0.5, signals
        return judge_step(signals, oldest)

    guard.judge.judge_step = look  # type: ignore[method-assign]

    def watched(*given: Any, **named: Any) -> Any:
        before, step = read(), guard.step
        answer = judge(*given, **named)
        if not guard.applies and guard.step == step + 1:
            assert same(before, read())
            refused.append(guard.step)
        return answer

    setattr(owner, name, watched)


class Ended(NamedTuple):
    """How a run has ended. state: see `read_state`; refused: steps; counts: of the stack, such as its steps."""

    state: list[Tensor]
    refused: list[int]
    counts: list[Any]


def train_titan(
    guarded: bool, folder: Path, backend: str = "partial_dtensor", steps: int = STEPS, nan: int = 0
) -> Ended:
    """torchtitan's trainer, of a small Llama under FSDP2, with two optimizers. nan: the step whose loss is that;
    without the guard its samples are left out."""
    import torch._utils
    from torch.distributed.fsdp import FSDPModule

    os.environ.setdefault("LOCAL_RANK", "0")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: torch.cpu
    from torchtitan import trainer as titan
    from torchtitan.components import metrics
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    no_memory = SimpleNamespace(
        device_name="cpu",
        get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
        reset_peak_stats=lambda: None,
    )
    metrics.build_device_memory_monitor = lambda: no_memory
    clip_gradients = utils.clip_grad_norm_
    utils.set_pg_timeouts = lambda **_: None  # its barrier asks for a device of CUDA
    skipped = [] if guarded else find_bad() + (find_samples(nan, nan) if nan else [])
    sampler, samples = build_sampler(skipped), BATCH // dist.get_world_size() // 2  # of two micro-batches

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, **given: Any) -> None:
            pass

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for tokens in read_batches(sampler, find_bad(), samples):
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"sampler": json.dumps(sampler.state_dict())}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            sampler.load_state_dict(json.loads(state["sampler"]))

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *given: Any, **named: Any) -> list[int]:
            return []

        def decode(self, *given: Any, **named: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return WORDS

    rope = llama3.ComplexRoPE.Config(dim=16, max_seq_len=64, theta=10000, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=1, dim=32, n_heads=2, hidden_dim=64, attn_backend="flex", rope=rope
    )
    layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    spec = llama3.model_registry("debugmodel")
    spec.model = llama3.Llama3Model.Config(
        dim=32, vocab_size=WORDS, layers=layers,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=WORDS, embedding_dim=32, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=32, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=32, out_features=WORDS, param_init=llama3._output_linear_init(32)),
    )  # fmt: skip
    adam = {"lr": 5e-3, "betas": (0.9, 0.95), "eps": 1e-8}
    config = titan.Trainer.Config(
        model_spec=spec, dump_folder=str(folder), tokenizer=Tokenizer.Config(), dataloader=Loader.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=OptimizersContainer.Config(
            param_groups=[
                ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs=adam),
                ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adam),
            ],
            implementation="for-loop",
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, total_steps=2 * STEPS),
        training=TrainingConfig(
            local_batch_size=samples, global_batch_size=BATCH, seq_len=LENGTH, steps=steps,
            disable_cuda_graphs=True, mixed_precision_param="float32",
        ),
        checkpoint=CheckpointManager.Config(enable=guarded, interval=60, last_save_model_only=False),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None, parallelism=ParallelismConfig(spmd_backend=backend),
    )  # fmt: skip
    config.debug.seed = 3
    refused, names = list[int](), {"sampler": sampler, "run": folder}

    def build_trainer() -> titan.Trainer:
        trainer = config.build()
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        compute, train = trainer.fwd_bwd_fn, trainer.train

        def train_watched() -> None:
            inner, (model,) = list(trainer.optimizers), trainer.model_parts
            guard = names["guard"].guard
            watch_refused(guard, trainer.optimizers, "step", lambda: read_state(model, inner), refused)
            train()

        if guarded:
            trainer.fwd_bwd_fn = lambda *given: compute(*given) * (float("nan") if trainer.step == nan else 1)
            trainer.train = train_watched
        return trainer

    names["config"] = SimpleNamespace(build=build_trainer)
    block = read_block("torchtitan")
    exec(block if guarded else re.sub(r".*TitanGuard.*\n", "", block), names)
    trainer: Any = names["trainer"]
    schedule = [scheduler.last_epoch for scheduler in trainer.lr_schedulers]
    state = read_state(trainer.model_parts[0], list(trainer.optimizers))
    trainer.close()
    assert utils.clip_grad_norm_ is clip_gradients  # for other trainers of this process
    return Ended(state, refused, [trainer.step, *schedule])


@pytest.mark.parametrize(("ranks", "backend"), [(1, "spmd_types"), (2, "partial_dtensor")])
def test_torchtitan(ranks: int, backend: str, tmp_path: Path) -> None:
    need("torchtitan")
    expected = run_ranks(ranks, train_titan, False, tmp_path / "plain", backend)
    ended = run_ranks(ranks, train_titan, True, tmp_path, backend)
    assert read_events(tmp_path) == [("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.refused == [FIRST] and one.counts == other.counts == [STEPS] * 3
        assert same(one.state, other.state)


def test_torchtitan_goes_on_behind_a_loss_that_is_not_finite_and_behind_a_kill(tmp_path: Path) -> None:
    need("torchtitan")
    backend = "partial_dtensor"
    expected = run_ranks(2, train_titan, False, tmp_path / "plain", backend, STEPS - 1, 50)
    run_ranks(2, train_titan, True, tmp_path, backend, 70, 50)
    ended = run_ranks(2, train_titan, True, tmp_path, backend, STEPS)
    assert read_events(tmp_path) == [("discarded", 50), ("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.counts == [STEPS, *other.counts[1:]] and same(one.state, other.state)


def train_olmo(guarded: bool, folder: Path, steps: int = STEPS, nan: int = 0) -> Ended:
    """OLMo-core's trainer, of a small Llama under FSDP2. nan: the step whose loss is that; without the guard OLMo-core
    leaves it out, in the schedule, too."""
    os.environ["OLMO_SHARED_FS"] = "1"
    from olmo_core.data.data_loader import DataLoaderBase
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig, CosWithWarmup
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import CheckpointerCallback
    from olmo_core.train.common import StepSkipRange
    from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

    ranks = dist.get_world_size()
    sampler = build_sampler([] if guarded else find_bad())

    class Loader(DataLoaderBase):
        total_batches = 2 * STEPS

        def _iter_batches(self) -> Iterator[dict[str, Tensor]]:
            for tokens in read_batches(sampler, find_bad(), BATCH // ranks):
                yield {"input_ids": tokens}

        def reshuffle(self, epoch: int | None = None, **given: Any) -> None:
            self._epoch = epoch

        def get_mock_batch(self) -> dict[str, Tensor]:
            return {"input_ids": torch.zeros(BATCH // ranks, LENGTH + 1, dtype=torch.long)}

        def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
            return ranks * batch["input_ids"].numel()

        def state_dict(self) -> dict[str, Any]:
            return {"sampler": sampler.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            sampler.load_state_dict(state["sampler"])

    torch.manual_seed(5)
    model = TransformerConfig.llama_like(d_model=32, n_layers=1, n_heads=2, vocab_size=WORDS).build(
        init_device="cpu"
    )
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=BATCH // ranks // 2 * (LENGTH + 1), max_sequence_length=LENGTH + 1,
        optim=AdamWConfig(lr=5e-3), max_grad_norm=1.0, scheduler=CosWithWarmup(warmup_steps=5, t_max=2 * STEPS),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp) if ranks > 1 else None,
    ).build(model, device=torch.device("cpu"))  # fmt: skip
    checkpointer = CheckpointerCallback(save_interval=60, save_async=False)
    trainer = TrainerConfig(
        save_folder=str(folder), max_duration=Duration.steps(steps), save_overwrite=True,
        metrics_collect_interval=1, callbacks={"checkpointer": checkpointer},
        steps_to_skip=[StepSkipRange(nan, nan + 1)] if nan and not guarded else None,
    ).build(
        module,
        Loader(work_dir=folder, global_batch_size=BATCH * (LENGTH + 1), dp_world_size=ranks, dp_rank=dist.get_rank()),
    )  # fmt: skip
    refused, read = list[int](), lambda: read_state(module.model, [module.optim])
    add_callback, record = trainer.add_callback, module.record_ce_loss

    def add_watched(name: str, callback: Any) -> None:
        begin = callback.pre_load_batch

        def watch() -> None:
            is_new = not hasattr(callback, "guard")
            begin()
            if is_new:
                watch_refused(callback.guard, module.optim, "step", read, refused)

        callback.pre_load_batch = watch
        add_callback(name, callback)

    if guarded:
        trainer.add_callback = add_watched
        module.record_ce_loss = lambda loss, *kind: record(
            loss * (float("nan") if trainer.global_step == nan else 1), *kind
        )
    block = read_block("OLMo-core")
    names = {"trainer": trainer, "sampler": sampler, "run": folder}
    exec(block if guarded else re.sub(r".*OLMoGuard.*\n", "", block), names)
    counts = [trainer.global_step, trainer.global_train_tokens_seen]
    return Ended(read(), refused, counts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_olmo_core(ranks: int, tmp_path: Path) -> None:
    need("olmo_core")
    expected = run_ranks(ranks, train_olmo, False, tmp_path / "plain")
    ended = run_ranks(ranks, train_olmo, True, tmp_path)
    assert read_events(tmp_path) == [("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.counts == other.counts == [STEPS, STEPS * BATCH * (LENGTH + 1)]
        assert one.refused == [FIRST] and same(one.state, other.state)


def test_olmo_core_goes_on_behind_a_loss_that_is_not_finite_and_behind_a_kill(tmp_path: Path) -> None:
    need("olmo_core")
    expected = run_ranks(2, train_olmo, False, tmp_path / "plain", STEPS, 50)
    run_ranks(2, train_olmo, True, tmp_path, 70, 50)
    ended = run_ranks(2, train_olmo, True, tmp_path, STEPS)
    assert read_events(tmp_path) == [("discarded", 50), ("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.counts == other.counts and same(one.state, other.state)


class ForCuda(TorchFunctionMode):
    """What asks for a tensor of CUDA, or whether it is one, gets on with one of the CPU."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        options = dict(named or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        answer = function(*given, **options)
        is_type = getattr(function, "__name__", "") == "type" and len(given) == 1
        return answer.replace("torch.", "torch.cuda.") if is_type else answer


class Arguments(SimpleNamespace):
    """Of Megatron-LM's command line; None where nothing is said."""

    def __getattr__(self, name: str) -> None:
        return None


@cache
def build_train_step(micro_batch: int) -> Any:
    """`train_step` of Megatron-LM, whose own start refuses to do without CUDA."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.core.timers import Timers
    from megatron.training import global_vars, training

    ranks = dist.get_world_size()
    global_vars._GLOBAL_ARGS = Arguments(
        micro_batch_size=micro_batch, data_parallel_size=ranks, gtp_weight_remat_size=1, seq_length=LENGTH,
        decoder_seq_length=LENGTH, empty_unused_memory_level=0, barrier_with_L1_time=False,
    )  # fmt: skip
    global_vars._GLOBAL_TIMERS = Timers(0, "minmax")
    init_num_microbatches_calculator(dist.get_rank(), None, 2 * micro_batch * ranks, micro_batch, ranks)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    return training.train_step


def train_megatron(
    guarded: bool,
    folder: Path,
    bf16: bool = False,
    sharded: bool = False,
    steps: int = STEPS,
    checkout: str = "",
) -> Ended:
    """A loop on Megatron-core, of a small GPT with dropout. sharded: by the distributed optimizer. A run of fewer steps
    leaves a checkpoint, with which the next one begins. checkout: of Megatron-LM, whose `train_step` is called then."""
    load_tensor = torch.storage._load_from_bytes
    if checkout:
        typing.override = typing_extensions.override  # type: ignore[attr-defined]  # needs Python 3.12
        sys.path.insert(0, checkout)
    stream = SimpleNamespace(wait_stream=lambda _: None)
    torch.cuda.current_device, torch.cuda.current_stream = lambda: "cpu", lambda: stream
    torch.cuda.synchronize = lambda: None
    ForCuda().__enter__()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    tracker = random.get_cuda_rng_tracker()
    tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(3).get_state()})
    parallel_state.initialize_model_parallel()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sampler = build_sampler([] if guarded else find_bad())
    kind = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, use_cpu_initialization=True, pipeline_dtype=kind,
        params_dtype=kind, bf16=bf16, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    torch.manual_seed(4)
    gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH).to(kind)
    parallel = DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=bf16)
    model = DistributedDataParallel(config, parallel, gpt)
    options = {
        "lr": 1e-2,
        "min_lr": 0.0,
        "weight_decay": 0.0,
        "bf16": bf16,
        "use_distributed_optimizer": sharded,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", clip_grad=1.0, **options), [model])
    schedule = {
        "init_lr": 0.0,
        "max_lr": 1e-2,
        "min_lr": 0.0,
        "lr_warmup_steps": 5 * BATCH,
        "lr_decay_steps": 2 * STEPS * BATCH,
    }
    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(optimizer, lr_decay_style="linear", **schedule, **decay)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()

    def forward_step(batches: Iterator[Tensor], model: nn.Module) -> Any:
        tokens = next(batches)
        places = torch.arange(LENGTH)[None].expand(len(tokens), -1)
        output = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:].contiguous())

        def compute_loss(output: Tensor) -> Any:
            loss, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int)
            return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}

        return output, compute_loss

    inner = [member.optimizer for member in optimizer.chained_optimizers]
    masters = [parameter for one in inner for group in one.param_groups for parameter in group["params"]]

    def read() -> list[Tensor]:
        state = read_state(model, inner)
        return [*state, *(parameter.detach().clone() for parameter in masters)]

    guard, refused, step, watched = None, list[int](), 0, forward_step
    if guarded:
        names = {
            "model": [model],
            "optimizer": optimizer,
            "opt_param_scheduler": scheduler,
            "sampler": sampler,
        }
        names |= {"forward_step": forward_step, "run": folder}
        exec(read_block("Megatron-core and Megatron-LM"), names)
        guard, watched = names["guard"].guard, names["forward_step"]
        watch_refused(guard, optimizer, "step_with_ready_grads", read, refused)
    parts = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "sampler": sampler,
        "guard": guard,
    }
    kept_file = folder / f"{rank}.pt"
    if kept_file.exists():
        kept = torch.load(kept_file, weights_only=False)
        for name, part in parts.items():
            part.load_state_dict(kept[name])
        torch.set_rng_state(kept["random"])
        tracker.set_states(kept["tracker"])
    batches = read_batches(sampler, find_bad(), BATCH // ranks // 2)
    step = guard.step if guard else 0
    while step < steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule_batch = get_forward_backward_func()
        if checkout:
            train_step = build_train_step(BATCH // ranks // 2)
            train_step(
                watched, batches, [model], optimizer, scheduler, config, schedule_batch, iteration=step
            )
        else:
            schedule_batch(
                forward_step_func=watched, data_iterator=batches, model=[model], num_microbatches=2, seq_length=LENGTH,
                micro_batch_size=BATCH // ranks // 2, decoder_seq_length=LENGTH, forward_only=False,
            )  # fmt: skip
            is_updated, _, _ = optimizer.step()
            if is_updated:
                scheduler.step(increment=BATCH)
        step = guard.step if guard else step + 1
    torch.storage._load_from_bytes = (
        load_tensor  # Megatron-LM has another, which the test's process does not know
    )
    if guarded and steps < STEPS:
        kept = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**kept, "random": torch.get_rng_state(), "tracker": tracker.get_states()}, kept_file)
    return Ended([*read(), *tracker.get_states().values()], refused, [step, scheduler.num_steps // BATCH])


@pytest.mark.parametrize(("bf16", "sharded"), [(False, False), (True, False), (False, True), (True, True)])
def test_megatron_core(bf16: bool, sharded: bool, tmp_path: Path) -> None:
    need("megatron.core")
    expected = run_ranks(2, train_megatron, False, tmp_path / "plain", bf16, sharded)
    ended = run_ranks(2, train_megatron, True, tmp_path, bf16, sharded)
    assert read_events(tmp_path) == [("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.counts == other.counts == [STEPS, STEPS]
        assert one.refused == [FIRST] and same(one.state, other.state)


def test_megatron_core_goes_on_behind_a_kill(tmp_path: Path) -> None:
    need("megatron.core")
    expected = run_ranks(2, train_megatron, False, tmp_path / "plain", True)
    run_ranks(2, train_megatron, True, tmp_path, True, False, 70)
    ended = run_ranks(2, train_megatron, True, tmp_path, True)
    assert read_events(tmp_path) == [("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.counts == other.counts and same(one.state, other.state)


NANOCHAT_LINES = (  # what scripts/base_train.py has, and what it becomes
    (
        "# GradScaler for fp16 training",
        "from megastable_guard import Guard\n"
        "guard = Guard(model, optimizer, run_dir=checkpoint_dir, interval=20)\n"
        "if resuming:\n    guard.load_state_dict(meta_data['guard'])\n"
        "# GradScaler for fp16 training",
    ),
    (
        "    for micro_step in range(grad_accum_steps):",
        "    mean_loss = 0.0\n    for micro_step in range(grad_accum_steps):",
    ),
    (
        "        train_loss = loss.detach() # for logging\n",
        "        train_loss = loss.detach() # for logging\n        mean_loss += train_loss / grad_accum_steps\n",
    ),
    (
        "        scaler.update()\n    else:\n        optimizer.step()\n",
        "        scaler.update()\n"
        "    else:\n"
        "        verdict = guard.check(loss=mean_loss)\n"
        "        if verdict.apply:\n            optimizer.step()\n"
        "        elif verdict.rewind:\n            step = guard.rewind() - 1 # the loop adds one\n",
    ),
    ('                "step": step,\n', '                "step": step, "guard": guard.state_dict(),\n'),
)  # fmt: skip


def train_nanochat(guarded: bool, folder: Path, resumed: int = -1) -> Ended:
    """nanochat's own script, on tokens of ours. Its loader does not go back: a run without the guard never reads the
    data of the steps that are undone, from the copy of step 80 on."""
    checkout = Path(os.environ["NANOCHAT"])
    os.environ.update(NANOCHAT_BASE_DIR=str(folder), WANDB_MODE="disabled")
    sys.path.insert(0, str(checkout))
    torch.compile = partial(torch.compile, backend="eager")  # traced, but no compiler is needed
    for name in ("rustbpe", "tiktoken", "wandb"):  # not used here
        sys.modules.setdefault(name, ModuleType(name))
    from nanochat import common, dataloader, tokenizer

    ranks, rank = dist.get_world_size(), dist.get_rank()

    def read_tokens(*_: Any, resume_state_dict: Any = None, **__: Any) -> Iterator[Any]:
        first = resume_state_dict["pq_idx"] if resume_state_dict else 0
        numbers = [number for number in range(4 * STEPS) if guarded or not 80 <= number < FIRST + 1]
        for place in range(first, len(numbers)):
            number, bad = numbers[place], range((FIRST - 1) * BATCH, (FIRST + 1) * BATCH)
            indices = range(number * BATCH, (number + 1) * BATCH)
            tokens = torch.tensor([write_tokens(index, bad) for index in indices])[rank::ranks]
            yield (
                tokens[:, :-1].contiguous(),
                tokens[:, 1:].contiguous(),
                {"epoch": 1, "pq_idx": place, "rg_idx": 0},
            )

    def run_at_once(collect: Any, place: int) -> Any:
        """gloo has no means and no futures. place: of the input."""

        def call(*given: Any, op: Any = dist.ReduceOp.SUM, async_op: bool = False, **named: Any) -> Any:
            if op == dist.ReduceOp.AVG:
                given[place].div_(ranks)
            collect(*given, **named)
            done = SimpleNamespace(wait=lambda: None)
            return SimpleNamespace(get_future=lambda: done)

        return call

    for name, place in (("all_reduce", 0), ("reduce_scatter_tensor", 1), ("all_gather_into_tensor", 1)):
        setattr(dist, name, run_at_once(getattr(dist, name), place))
    dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit = read_tokens
    tokenizer.get_tokenizer = lambda: SimpleNamespace(get_vocab_size=lambda: WORDS)
    tokenizer.get_token_bytes = lambda **_: torch.ones(WORDS)
    common.compute_cleanup = lambda: None  # the ranks end elsewhere
    code = (checkout / "scripts/base_train.py").read_text()
    for old, new in NANOCHAT_LINES if guarded else ():
        assert code.count(old) == 1, f"nanochat has changed: {old}"
        code = code.replace(old, new)
    options = (
        f"--device-type cpu --depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len {LENGTH} --window-pattern L "
        f"--num-iterations {STEPS} --device-batch-size {BATCH // ranks} --total-batch-size {BATCH * LENGTH} "
        "--embedding-lr 9 --unembedding-lr 1 --matrix-lr 0.4 --warmup-steps 5 --warmdown-ratio 0.1 --eval-every -1 "
        f"--core-metric-every -1 --sample-every -1 --save-every 70 --resume-from-step {resumed}"
    )
    sys.argv = ["base_train", *options.split()]
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "base_train.py", "exec"), names)
    return Ended(read_state(names["orig_model"], [names["optimizer"]]), [], [names["step"]])


def test_nanochat(tmp_path: Path) -> None:
    if "NANOCHAT" not in os.environ:
        pytest.skip("NANOCHAT names no checkout of nanochat")
    folder = tmp_path / "base_checkpoints/d2"
    expected = run_ranks(2, train_nanochat, False, tmp_path / "plain")
    ended = run_ranks(2, train_nanochat, True, tmp_path)
    assert read_events(folder) == [("discarded", FIRST), ("rewound", FIRST + 1)]
    resumed = run_ranks(2, train_nanochat, True, tmp_path, 70)
    assert read_events(folder) == [("discarded", FIRST), ("rewound", FIRST + 1)] * 2
    for one, again, other in zip(ended, resumed, expected, strict=True):
        assert one.counts == other.counts and same(one.state, other.state)
        assert again.counts == other.counts


def test_the_page_has_lines_of_nanochat() -> None:
    """Its block is not run by itself: it has none that the script below does not get."""
    new_lines = {
        line.strip() for _, new in NANOCHAT_LINES for line in new.replace(", interval=20", "").splitlines()
    }
    told_lines = [line.strip().replace('"', "'") for line in read_block("nanochat").splitlines()]
    told_lines = [line.partition("  #")[0] for line in told_lines]
    assert len(told_lines) == 9
    assert not {*told_lines} - {line.partition(" #")[0] for line in new_lines}


def test_megatron_lm(tmp_path: Path) -> None:
    """Its newest `train_step`, on its own Megatron-core."""
    if "MEGATRON_LM" not in os.environ:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM")
    rest = (True, True, STEPS, os.environ["MEGATRON_LM"])
    expected = run_ranks(2, train_megatron, False, tmp_path / "plain", *rest)
    ended = run_ranks(2, train_megatron, True, tmp_path, *rest)
    assert read_events(tmp_path) == [("discarded", FIRST), ("rewound", FIRST + 1)]
    for one, other in zip(ended, expected, strict=True):
        assert one.counts == other.counts == [STEPS, STEPS]
        assert one.refused == [FIRST] and same(one.state, other.state)


def refuse_uncovered() -> list[str]:
    """What the adapters say to what they do not cover."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: torch.cpu
    from megatron.core.optimizer import OptimizerConfig
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import SkipStepAdamWConfig
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    from megastable_guard.adapters.megatron_optimizer import MegatronGuard
    from megastable_guard.adapters.olmo_core import OLMoGuard
    from megastable_guard.adapters.torchtitan import TitanGuard

    said, model = list[str](), SimpleNamespace(config=SimpleNamespace(qk_clip=False))
    trainer = SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(disable_cuda_graphs=False)))
    config = TransformerConfig.llama_like(d_model=32, n_layers=1, n_heads=2, vocab_size=WORDS)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=LENGTH, max_sequence_length=LENGTH, optim=SkipStepAdamWConfig()
    ).build(config.build(init_device="cpu"), device=torch.device("cpu"))
    callback = OLMoGuard()
    callback.trainer = SimpleNamespace(global_train_tokens_seen=0, train_module=module)
    clipped = SimpleNamespace(config=SimpleNamespace(qk_clip=True))
    wants = [
        lambda: TitanGuard(trainer), callback.pre_load_batch,
        lambda: MegatronGuard([model], SimpleNamespace(config=OptimizerConfig(fp16=True)), None),
        lambda: MegatronGuard([clipped], SimpleNamespace(config=OptimizerConfig()), None),
    ]  # fmt: skip
    for want in wants:
        with pytest.raises(RuntimeError) as refusal:
            want()
        said.append(str(refusal.value).split(":")[0])
    return said


def test_adapters_refuse_by_name_what_they_do_not_cover() -> None:
    for package in ("torchtitan", "olmo_core", "megatron.core"):
        need(package)
    ((graphs, skips, *others),) = run_ranks(1, refuse_uncovered)
    assert "CUDA graphs" in graphs and "SkipStepOptimizer" in skips
    assert others == ["no guard for fp16, optimizer_cpu_offload, qk_clip, grad_norm_skip_threshold"] * 2
