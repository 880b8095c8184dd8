"""DeepSpeed's own checkpoints of every ZeRO stage, as new runs: weights and moments bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.whole import WholeState
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.parallel.layout import Layout
from megastable.parallel.sharding import placement_of
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import Imported
from megastable_tools.convert.foreign.deepspeed import ZeroState, find_deepspeed_folder, import_deepspeed
from megastable_tools.convert.huggingface.architectures import map_tensor_names
from tests.distributed import run_ranks
from tests.patience import PATIENCE

VOCABULARY, LENGTH, STEPS = 250, 16, 3
# hidden, heads and head width that no number of ranks here divides: every cut has padding.
MODEL = dict(
    layers=2, hidden=15, heads=3, kv_heads=1, head_dim=6, ffn=13, sequence_length=LENGTH, vocab_size=VOCABULARY,
    vocab_multiple=5, init_std=0.1,
)  # fmt: skip
# ZeRO, precision, and what moves parameters in the buffers
SETTINGS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "bf16", {}), (1, "fp16", {}), (2, "fp32", {}), (2, "bf16", {"round_robin_gradients": True}),
    (3, "bf16", {}), (3, "fp32", {"sub_group_size": 400}),
]  # fmt: skip


def recipe(zero: int = 1, precision: str = "bf16", world: int = 1, **model: Any) -> RunConfig:
    tree = {
        "model": MODEL | model, "precision": {"kind": precision, "initial_scale_power": 8},
        "train": {"global_batch": 2 * world, "micro_batch": 2}, "parallel": {"zero": zero},
    }  # fmt: skip
    return RunConfig.model_validate(tree)


def steps(engine: Any, first: int, end: int) -> list[float]:
    """Train on random tokens of each step; the losses."""
    import torch.distributed as dist

    from megastable.data.loader import MicroBatch

    losses = []
    for step in range(first, end):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=random)
        batch = MicroBatch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), torch.arange(2), segments=None)
        measured, _ = engine.train_step([batch], 1e-2, judge=lambda m: m.finite)
        losses.append(measured.loss)
    return losses


def train_ours(folder: Path, world: int) -> dict[str, Any]:
    """Every setting for a few steps; what the engine says of itself at the end of each."""
    import torch.distributed as dist

    from megastable.config import deepspeed_json
    from megastable.engine.engine import Engine
    from megastable.parallel.topology import Topology

    topology = Topology(Layout(1, 1, world), dist.get_rank(), timeout=PATIENCE)
    found: dict[str, dict[str, Any]] = {}
    for zero, precision, more in SETTINGS:
        c = recipe(zero, precision, world)
        ds = deepspeed_json.build_deepspeed_json(c, world)
        ds["zero_optimization"] |= more
        engine = Engine(c, ds, topology)
        steps(engine, 0, STEPS)
        name = f"{zero}-{precision}"
        engine.ds.save_checkpoint(str(folder / name), client_state={"cursor": 6 * world})
        flat = engine.flat_state()
        found[name] = {kind: flat.gather_shards(kind) for kind in KINDS}
        if zero < 3:
            parameters = engine.ds.module.parameters()
            found[name]["module"] = {placement_of(p).name: p.detach().clone() for p in parameters}
    return found


class Named(nn.Module):
    """Parameters with the names of Hugging Face's model; what it computes does not matter here."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        for parts in map_tensor_names(run.model).values():
            for part in parts:
                module: nn.Module = self
                *path, last = part.name.split(".")
                for key in path:
                    if key not in dict(module.named_children()):
                        module.add_module(key, nn.Module())
                    module = module.get_submodule(key)
                module.register_parameter(last, nn.Parameter(torch.randn(part.shape)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x[0, 0]).float().sin().sum() for p in self.parameters()]).sum()


def train_theirs(folder: Path, tree: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """A model with other names through DeepSpeed alone, which pickles its enums as Python 3.11.0 to 3.11.3 do."""
    import deepspeed
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    outer = nn.Module()
    outer.model = Named(RunConfig.model_validate(tree))
    outer.forward = outer.model.forward
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    adam = torch.optim.AdamW(outer.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=outer, optimizer=adam, config=config, dist_init_required=False)
    for step in range(STEPS):
        engine.backward(engine(torch.full((1, 1), 0.1 * step + 1, dtype=torch.bfloat16)))
        engine.step()
    ZeroStageEnum.__reduce_ex__ = lambda self, _: (getattr, (type(self), self.name))
    engine.save_checkpoint(str(folder))
    found: dict[str, dict[str, Tensor]] = {}
    for name, p in engine.module.model.named_parameters():
        moments = [safe_get_full_optimizer_state(p, kind) for kind in KINDS[1:]]
        found[name] = dict(zip(KINDS, [safe_get_full_fp32_param(p), *moments], strict=True))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Any]]:
    """By number of ranks: the folder of DeepSpeed's checkpoints, and what the engines held by setting and kind."""

    @cache
    def train(world: int) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("deepspeed")
        return folder, run_ranks(world, train_ours, folder, world)[0]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("zero", "precision"), [setting[:2] for setting in SETTINGS])
def test_import_deepspeed_takes_weights_moments_and_step_of_the_engines(
    trained: Any, tmp_path: Path, world: int, zero: int, precision: str
) -> None:
    folder, held = trained(world)
    name = f"{zero}-{precision}"
    said: list[str] = []
    run = recipe(zero, precision)
    made = import_deepspeed(folder / name, tmp_path / "run", run, said.append)
    store.verify_checkpoint(made)
    whole, state = WholeState(made), store.read_state(made)
    assert whole.kinds == KINDS and set(whole.names) == set(held[name]["weight"])
    # There DeepSpeed 0.19.8 itself does not know where a parameter's master weights lie, and so the engine does not.
    lost = (zero, precision) == (2, "bf16") and world > 1
    for kind in KINDS[: 0 if lost else None]:
        for parameter, value in held[name][kind].items():
            assert torch.equal(whole.read_tensor(parameter, kind), value), (parameter, kind)
    for parameter, value in held[name].get("module", {}).items():
        assert torch.equal(whole.read_tensor(parameter, "weight").to(value.dtype), value), parameter
    assert any(v.abs().max() > 0 for v in held[name]["exp_avg_sq"].values())
    assert (state.step, state.updates, state.cursor, state.adam_step) == (STEPS, STEPS, 6 * world, STEPS)
    assert state.scaler == ({"cur_scale": 256.0} if precision == "fp16" else {})
    assert "no checksums" in said[0] and f"ZeRO {zero}" in said[1] and "with Adam's moments" in said[1]
    assert "rope_theta=10000 norm_eps=1e-05" in said[2]  # where nothing else says it
    [event] = RunDirectory(tmp_path / "run").iterate_events(Imported)
    assert event["steps"] == STEPS and event["source"] == str(folder / name / f"global_step{STEPS}")


def test_import_deepspeed_fuses_hugging_faces_names_with_their_moments(tmp_path: Path) -> None:
    run = recipe()
    [theirs] = run_ranks(1, train_theirs, tmp_path / "ds", run.model_dump(mode="json"))
    said: list[str] = []
    made = import_deepspeed(tmp_path / "ds" / f"global_step{STEPS}", tmp_path / "run", run, said.append)
    whole = WholeState(made)
    for name, parts in map_tensor_names(run.model).items():
        for kind in KINDS:
            expected = torch.cat([theirs[part.name][kind] for part in parts])
            assert torch.equal(whole.read_tensor(name, kind)[: len(expected)], expected), (name, kind)
    assert "Hugging Face's" in said[1] and "ZeRO 2" in said[1]


@pytest.fixture(scope="module")
def small(trained: Any) -> Path:
    return Path(trained(2)[0])


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("setting", ["1-bf16", "2-fp32", "3-bf16"])
def test_import_deepspeed_refuses_a_missing_rank_and_a_damaged_file(
    small: Path, tmp_path: Path, setting: str
) -> None:
    source = small / setting / f"global_step{STEPS}"
    for at, pattern in enumerate(("*_rank_0_*optim_states.pt", "*_rank_1_*optim_states.pt")):
        folder = copied(source, tmp_path / f"missing-{at}")
        next(folder.glob(pattern)).unlink()
        with pytest.raises(CheckpointError, match="missing"):
            import_deepspeed(folder, tmp_path / "run", recipe(), print)
    folder = copied(source, tmp_path / "damaged")
    file = next(folder.glob("*_rank_1_*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="_rank_1_"):
        import_deepspeed(folder, tmp_path / "run", recipe(), print)
    assert not (tmp_path / "run").exists()


def test_zero_state_refuses_files_that_contradict_each_other(small: Path, tmp_path: Path) -> None:
    folder = copied(small / "2-fp32" / f"global_step{STEPS}", tmp_path / "mixed")
    file = next(folder.glob("*_rank_1_*optim_states.pt"))
    content = torch.load(file, weights_only=False)
    weights = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = torch.zeros(3)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="does not fit into the files"):
        ZeroState(folder)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0] = weights.roll(1)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="in the optimizer's files is not the one in the model's"):
        import_deepspeed(folder, tmp_path / "run", recipe(2, "fp32"), print)
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["step"] = torch.tensor(99.0)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="at steps 3, 99"):
        ZeroState(folder)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"layers": 3}, "3.attention_norm.weight is missing"), ({"layers": 1}, "2.weight is missing"),
        ({"ffn": 11}, "1.mlp.gate_up.weight is .26, 15., in"), ({"tied": True}, "4.weight has no home"),
        ({"qk_norm": False}, "1.attention.k_norm.weight has no home"),
    ],
)  # fmt: skip
def test_import_deepspeed_refuses_another_model_by_its_parameter(
    small: Path, tmp_path: Path, model: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        import_deepspeed(small / "1-bf16", tmp_path / "run", recipe(**model), print)
    assert not (tmp_path / "run").exists()


def test_import_deepspeed_names_what_cannot_be_read(small: Path, tmp_path: Path) -> None:
    def refused(folder: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            import_deepspeed(folder, tmp_path / "run", recipe(), print)

    source = small / "1-bf16" / f"global_step{STEPS}"
    refused(tmp_path / "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "not a checkpoint of DeepSpeed")
    pipeline = copied(source, tmp_path / "pipeline")
    (pipeline / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    refused(pipeline, "pipeline parallelism .2 model-parallel ranks.*ds_to_universal")
    experts = copied(source, tmp_path / "experts")
    (experts / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b"")
    refused(experts, "mixture of experts")
    plain = copied(source, tmp_path / "plain")
    for path in plain.glob("*optim_states.pt"):
        path.unlink()
    refused(plain, "without ZeRO")
    frozen = copied(source, tmp_path / "frozen")
    file = next(frozen.glob("mp_rank*"))
    content = torch.load(file, weights_only=False)
    torch.save(content | {"frozen_param_shapes": {"1.mlp.\x1b[2J": torch.Size([3])}}, file)
    refused(frozen, r"1\.mlp\.\\x1b.*frozen")
    torch.save(content | {"param_shapes": [{"0.weight": (1 << 50,)}]}, file)
    refused(frozen, "impossibly large")
    torch.save({"weight": torch.ones(1)}, file)
    refused(frozen, "param_shapes")
    torch.save(content | {"param_shapes": [{"0.weight": (1 << 40,)}] * 2}, file)
    refused(frozen, "two groups")
    torch.save(content | {"param_shapes": [{"0.weight": (1 << 40,)}, {}]}, file)
    refused(frozen, "does not fit")
    with pytest.raises(ConfigError, match="vocab_size"):
        import_deepspeed(source, tmp_path / "run", recipe(vocab_size=None), print)
    with pytest.raises(ConfigError, match=r"^model\.experts: experts are not imported"):
        import_deepspeed(source, tmp_path / "run", recipe(experts={"count": 2}), print)
    assert not (tmp_path / "run").exists()


def test_find_takes_latest_or_the_only_folder(small: Path, tmp_path: Path) -> None:
    source = small / "1-bf16" / f"global_step{STEPS}"
    assert find_deepspeed_folder(source.parent) == find_deepspeed_folder(source) == source
    for name in ("global_step3", "global_step4"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="several checkpoints"):
        find_deepspeed_folder(tmp_path)
    for text in ("global_step5", "../1-bf16", "\x1b"):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match=r"latest names.*global_step3, global_step4"):
            find_deepspeed_folder(tmp_path)
    (tmp_path / "latest").write_text("global_step3\n")
    assert find_deepspeed_folder(tmp_path) == tmp_path / "global_step3"
