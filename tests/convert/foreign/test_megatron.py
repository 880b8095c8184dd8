"""Megatron-core's checkpoints: its own model computes what ours does, and what comes back is the same bytes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import write_run
from megastable.checkpoint.plain import load_plain
from megastable.checkpoint.store import LayoutState, RunState
from megastable.checkpoint.whole import WholeState, describe_parameters, run_of
from megastable.config.tree import RunConfig
from megastable_tools.convert.foreign.megatron import export_megatron, find_iteration_folder, import_megatron
from megastable_tools.convert.foreign.megatron_args import CENTERED, NAMES
from megastable_tools.convert.inspecting import list_differences
from tests.convert.foreign import mcore
from tests.distributed import run_ranks

MODEL = dict(
    layers=4, hidden=32, heads=8, kv_heads=2, head_dim=6, ffn=20, sequence_length=24, vocab_size=101, vocab_multiple=16,
    rope_theta=50_000.0, norm_eps=1e-3,
)  # fmt: skip
LLAMA3 = {"kind": "llama3", "factor": 32.0, "original_length": 8192}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


def made(folder: Path, **model: Any) -> Path:
    """A run whose weights are all different from one another, norms too."""
    run = RunConfig.model_validate({"model": MODEL | model, "precision": {"kind": "bf16"}})
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, _: str) -> Tensor:
        shape = describe_parameters(run.model)[name].shape
        return torch.randn(shape, generator=generator) * 0.2 + (1 if len(shape) == 1 else 0)

    layout = LayoutState(tensor=1, pipeline=1, data=1, zero=1, precision="bf16")
    state = RunState(step=7, order_fingerprint="", layout=layout)
    return write_run(folder, run, state, draw, optimizer=None, origin={})


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by their model, each made once."""
    done: dict[str, Path] = {}

    def checkpoint(**model: Any) -> Path:
        key = json.dumps(model)
        if key not in done:
            done[key] = made(tmp_path_factory.mktemp("ours") / "run", **model)
        return done[key]

    return checkpoint


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store_ = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store_}", rank=0, world_size=1)
    with mcore.on_the_cpu():
        yield
    dist.destroy_process_group()


def tokens() -> Tensor:
    return torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def our_logits(checkpoint: Path) -> Tensor:
    return load_plain(checkpoint)(tokens())


@pytest.mark.quick("{'qk_norm': False, 'qkv_bias': True}", "{'tied': True}")
@pytest.mark.parametrize(
    "model",
    [
        {}, {"qk_norm": False}, {"tied": True}, {"kv_heads": 8}, {"heads": 4, "kv_heads": 1, "head_dim": None},
        {"qk_norm": False, "qkv_bias": True}, {"rope_theta": 1e9, "rope_scaling": LLAMA3},
        {"rope_scaling": {"kind": "linear", "factor": 4.0}}, {"attention_scale": 0.9}, {"window": 5},
        {"window": 5, "full_attention_every": 2},
    ],
    ids=str,
)  # fmt: skip
def test_export_megatron_computes_the_same_in_megatron(
    ours: Any, alone: None, tmp_path: Path, model: dict[str, Any]
) -> None:
    checkpoint = ours(**model)
    folder = export_megatron(checkpoint, tmp_path / "megatron", local=True)
    theirs = mcore.logits(folder, tokens(), 1, 1)
    expected = our_logits(checkpoint)
    assert theirs is not None and expected.std() > 0.3
    assert (theirs[..., :101] - expected).abs().max() < 1e-4


def test_import_megatron_takes_what_megatrons_model_holds(ours: Any, alone: None, tmp_path: Path) -> None:
    """The other way round: from its own state_dict, extra state, names and all."""
    exported = export_megatron(ours(), tmp_path / "args", local=True)
    content = torch.load(exported / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
    torch.manual_seed(3)
    model = mcore.build(content["args"])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (1 if p.dim() == 1 else 0))
    place = tmp_path / "saved" / "iter_0000123" / "mp_rank_00"
    place.mkdir(parents=True)
    state = model.state_dict()
    assert any(name.endswith("_extra_state") for name in state)
    saved = {"args": content["args"], "checkpoint_version": 3.0, "iteration": 123, "model": state}
    torch.save(saved, place / "model_optim_rng.pt")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("123")
    said: list[str] = []
    checkpoint = import_megatron(tmp_path / "saved", tmp_path / "run", None, said.append)
    assert "iteration 123" in said[0] and "moments are not imported" in said[0]
    store.verify_checkpoint(checkpoint)
    assert WholeState(checkpoint).kinds == ("weight",) and store.read_state(checkpoint).step == 0
    run = run_of(checkpoint).model
    assert (run.vocab_size, run.padded_vocab, run.sequence_length) == (101, 112, 24)
    x = tokens()
    with torch.no_grad():
        mask = torch.ones(1, 1, 24, 24).triu(1).bool()
        theirs = model(x, torch.arange(24).expand(2, -1), mask)
    assert (theirs[..., :101] - our_logits(checkpoint)).abs().max() < 1e-4


@pytest.mark.slow
def test_export_megatron_computes_the_same_on_megatrons_ranks(ours: Any, tmp_path: Path) -> None:
    """Its own tensor and pipeline ranks, each with its file, loaded strictly."""
    models: list[dict[str, Any]] = [{}, {"tied": True}, {"qkv_bias": True}]
    cases = [(model, tensor, pipeline) for model in models for tensor, pipeline in ((2, 1), (1, 2))]
    folders = [
        (export_megatron(ours(**model), tmp_path / str(n), tensor, pipeline, local=True), tensor, pipeline)
        for n, (model, tensor, pipeline) in enumerate(cases)
    ]
    answers = run_ranks(2, mcore.ranks_logits, folders, tokens())[0]
    for (model, _, _), parts in zip(cases, answers, strict=True):
        theirs = torch.cat([part for part in parts if part is not None], -1)
        assert (theirs[..., :101] - our_logits(ours(**model))).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "local"),
    [
        ({"tied": True, "qk_norm": False}, True),
        ({"qkv_bias": True, "rope_scaling": LLAMA3, "max_positions": 99}, False),
        (
            {"zero_centered_norms": True, "attention_scale": 0.9, "window": 5, "full_attention_every": 2},
            False,
        ),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0}, "window": 1}, True),
    ],
    ids=str,
)
def test_import_megatron_gives_back_the_same_bytes(
    ours: Any, tmp_path: Path, model: dict[str, Any], local: bool
) -> None:
    source = ours(**model)
    before = WholeState(source)
    keys = "head_width tied qkv_bias rope_scaling sequence_length longest score_scale window padded_vocab".split()
    for tensor, pipeline in LAYOUTS:
        name = f"{tensor}-{pipeline}"
        export_megatron(source, tmp_path / name, tensor, pipeline, local=local)
        with_recipe = run_of(source) if pipeline == 1 else None
        checkpoint = import_megatron(tmp_path / name, tmp_path / f"run-{name}", with_recipe, lambda _: None)
        after = WholeState(checkpoint)
        assert {one.outcome for one in list_differences(before, after)} == {"identical"}
        # Padding and sizes came along: the recipe that Megatron's arguments make is the old one's.
        for key in (*keys, "full_attention_every", "zero_centered_norms"):
            assert getattr(run_of(checkpoint).model, key) == getattr(run_of(source).model, key)


def changed(
    ours: Any, folder: Path, change: Callable[[dict[str, Any]], Any], rank: str = "00", **model: Any
) -> Path:
    """An export of two tensor ranks with something changed in the file of one."""
    if not folder.exists():
        export_megatron(ours(**model), folder, tensor=2)
    file = folder / "iter_0000007" / f"mp_rank_{rank}" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    change(content)
    torch.save(content, file)
    return folder


@pytest.mark.quick("qk_l2_norm-True", "norm_epsilon*")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_rope_scaling", True), ("rotary_percent", 0.5), ("add_bias_linear", True), ("add_qkv_bias", True),
        ("num_experts", 8), ("position_embedding_type", "learned_absolute"), ("layernorm_zero_centered_gamma", True),
        ("apply_layernorm_1p", "yes"), ("swiglu", False), ("window_size", (128, 0)), ("window_size", (128, 128)),
        ("window_size", "128"), ("softmax_scale", 0.5), ("softmax_scale", "x"), ("qk_l2_norm", True),
        ("rotary_seq_len_interpolation_factor", 4), ("spec", ["a", "b"]), ("num_layers", 6), ("rotary_base", 10_000),
        ("norm_epsilon", 1e-5), ("qk_layernorm", False), ("num_query_groups", 4), ("kv_channels", 8),
        ("untie_embeddings_and_output_weights", False), ("tensor_model_parallel_size", 4),
    ],
)  # fmt: skip
def test_import_megatron_refuses_an_option_by_name(ours: Any, tmp_path: Path, key: str, value: Any) -> None:
    folder = changed(ours, tmp_path / "megatron", lambda content: setattr(content["args"], key, value))
    names = {
        "num_layers": "model.layers", "rotary_base": "model.rope_theta", "norm_epsilon": "model.norm_eps",
        "qk_layernorm": "model.qk_norm", "num_query_groups": "model.kv_heads", "kv_channels": "model.head_dim",
        "untie_embeddings_and_output_weights": "model.tied", "add_qkv_bias": "model.qkv_bias",
        "use_rope_scaling": "model.rope_scaling",
    }  # fmt: skip
    # What this model can have, but the recipe's has not.
    centered = "model.zero_centered_norms=False, in the checkpoint True"
    message = {
        ("window_size", (128, 0)): "model.window=None, in the checkpoint 129",
        ("softmax_scale", 0.5): "model.attention_scale=None, in the checkpoint 0.5",
        ("rotary_seq_len_interpolation_factor", 4): "model.rope_scaling=None, in the checkpoint {'kind': 'linear'",
        (CENTERED[1], True): centered,
    }.get((key, value) if key != "spec" else (), names.get(key, key))  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        import_megatron(folder, tmp_path / "run", run_of(ours()), print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_proj.bias", "decoder.layers.1.mlp.experts.linear_fc1.weight0",
        "language_model.encoder.final_norm.weight", "decoder.\x1b[2Jlayers",
    ],
)  # fmt: skip
def test_import_megatron_refuses_a_tensor_by_name(ours: Any, tmp_path: Path, name: str) -> None:
    for rank in ("00", "01"):
        folder = changed(
            ours, tmp_path / "megatron", lambda content: content["model"].update({name: torch.ones(2)}), rank
        )
    with pytest.raises(CheckpointError) as caught:
        import_megatron(folder, tmp_path / "run", run_of(ours()), print)
    assert name.replace("\x1b", "\\x1b") in str(caught.value) and "no home" in str(caught.value)


@pytest.mark.slow
def test_import_megatron_refuses_files_that_do_not_belong_together(ours: Any, tmp_path: Path) -> None:
    def refused(change: Callable[[dict[str, Any]], Any], match: str, at: str = "01") -> None:
        folder = tmp_path / f"megatron-{len(list(tmp_path.iterdir()))}"
        changed(ours, folder, change, at)
        with pytest.raises(CheckpointError, match=match):
            import_megatron(folder, tmp_path / "run", run_of(ours()), print)
        assert not (tmp_path / "run").exists()

    norm = "decoder.final_layernorm.weight"
    refused(lambda c: c["model"][norm].mul_(2), "different copies of final_norm")
    refused(lambda c: c["model"].pop(norm), f"not all tensor ranks hold {norm}")
    refused(lambda c: c.update(iteration=8), "of iteration 8, other files of 7")
    refused(lambda c: c.update(checkpoint_version=2.0), "checkpoint_version=2.0", "00")
    refused(lambda c: c.pop("checkpoint_version"), "checkpoint_version=0", "00")
    refused(lambda c: c.update(model0=c.pop("model")), "interleaved", "00")
    refused(lambda c: c.pop("model"), "no model", "00")
    refused(lambda c: c["model"].update({norm: torch.ones(3)}), r"final_norm.weight is \(3,\)")
    refused(lambda c: c["model"].update({norm: torch.ones(32).to(torch.float8_e4m3fn)}), "FP8")
    refused(lambda c: c["model"].update({norm: argparse.Namespace()}), "not a tensor")
    word = "embedding.word_embeddings.weight"
    refused(lambda c: c["model"].update({word: torch.ones(5, 32)}), "embedding.weight|vocabulary")


def test_import_megatron_refuses_a_tied_head_that_differs(ours: Any, tmp_path: Path) -> None:
    export_megatron(ours(tied=True), tmp_path / "megatron", pipeline=2)
    file = tmp_path / "megatron" / "iter_0000007" / "mp_rank_00_001" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    content["model"]["output_layer.weight"] += 1
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="different copies of embedding"):
        import_megatron(tmp_path / "megatron", tmp_path / "run", None, print)


@pytest.mark.quick("model3*", "model2*")
@pytest.mark.parametrize(
    ("model", "tensor", "pipeline", "match"),
    [
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_length": 9}}, 1, 1, "rope_scaling=.*Llama 3.1"),
        ({"logit_softcap": 9.0}, 1, 1, "logit_softcap=9.0"), ({"mup": {"base_width": 16}}, 1, 1, "model.mup="),
        ({"rope_scaling": LLAMA3 | {"original_length": 4096}}, 1, 1, "rope_scaling=.*original_length=8192"),
        ({"qk_norm": "full"}, 1, 1, "qk_norm=full"), ({"norms": "after"}, 1, 1, "norms=after"),
        ({}, 3, 1, "tensor=3 does not divide model.heads"), ({}, 1, 3, "pipeline=3 does not divide"),
        ({}, 0, 1, "tensor=0"), ({"vocab_multiple": 1}, 2, 1, "vocab_multiple"),
        ({"experts": {"count": 2}}, 1, 1, "^model.experts: experts are not exported"),
    ],
)  # fmt: skip
def test_export_megatron_refuses_before_anything_is_written(
    ours: Any, tmp_path: Path, model: dict[str, Any], tensor: int, pipeline: int, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        export_megatron(ours(**model), tmp_path / "megatron", tensor, pipeline)
    assert not list(tmp_path.iterdir())


def test_import_megatron_refuses_a_recipe_with_experts(ours: Any, tmp_path: Path) -> None:
    run = RunConfig.model_validate({"model": MODEL | {"experts": {"count": 2}}})
    with pytest.raises(ConfigError, match=r"^model\.experts: experts are not imported from Megatron"):
        import_megatron(tmp_path, tmp_path / "run", run, print)


def test_find_says_what_a_folder_is(ours: Any, tmp_path: Path) -> None:
    def refused(folder: Path, match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            import_megatron(folder, tmp_path / "run", None, print)

    refused(tmp_path / "nowhere", "no such folder")
    folder = tmp_path / "megatron"
    folder.mkdir()
    refused(folder, "neither latest_checkpointed_iteration.txt")
    tracker = folder / "latest_checkpointed_iteration.txt"
    for text, match in (("../x", "not an iteration number"), ("12", "iter_0000012 is missing")):
        tracker.write_text(text)
        refused(folder, match)
    tracker.write_text("release\n")
    (folder / "release").mkdir()
    assert find_iteration_folder(folder) == folder / "release"
    refused(folder, "mp_rank_00")
    (folder / "release" / "metadata.json").write_text("{}")
    refused(folder, "ckpt-convert-format torch")
    (folder / "release" / "metadata.json").unlink()
    (folder / "release" / "mp_rank_00_000_001").mkdir()
    refused(folder, "expert parallelism")
    (folder / "release" / "mp_rank_00_000_001").rmdir()
    (folder / "release" / "mp_rank_99999_00001").mkdir()
    refused(folder, "tensor rank 0, stage 0 is missing")


def test_names_of_transformer_engine_are_those_that_megatron_maps_to() -> None:
    """It is not needed for that: the local spec says what its norms are called there."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    mapped = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    for name, local in NAMES["norms"]["local"].items():
        there = next(local.replace(old, new) for old, new in mapped.items() if local.startswith(old))
        assert NAMES["norms"]["transformer_engine"][name] == there
