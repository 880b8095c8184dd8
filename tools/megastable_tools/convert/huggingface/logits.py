"""Compute logits of our model and of transformers' on the same tokens, in fp32; layer by layer if memory is short."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megastable.base.errors import CheckpointError, MegastableError
from megastable.checkpoint import store
from megastable.checkpoint.plain import PlainModel, without_weights
from megastable.config.tree import RunConfig
from megastable.parallel.sharding import place, placement_of
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder, parameters_in


def ours(
    run: RunConfig, checkpoint: Path, weights: Callable[[str], Tensor], tokens: Tensor, at: Tensor
) -> Tensor:
    """Logits [rows, positions, vocabulary] of our model; one layer's weights are in memory at a time."""
    gpt = without_weights(run.model, torch.device("cpu"))
    model = PlainModel(gpt, run, checkpoint, store.step_of(checkpoint), "").eval()

    def fill(layer: nn.Module) -> None:
        for owner, key, parameter in parameters_in(layer):
            placement = placement_of(parameter)
            filled = nn.Parameter(weights(placement.name), requires_grad=False)
            place(filled, placement, 1)
            setattr(owner, key, filled)

    for number, layer in enumerate(gpt.children()):
        _lazily(layer, fill, keep=number == 0 and run.model.tied)
    hidden = model.hidden(tokens)[at]
    return model.logits(hidden).transpose(0, 1)[..., : model.vocabulary].float()


def _lazily(layer: nn.Module, fill: Callable[[nn.Module], None], keep: bool = False) -> None:
    """Fill a layer's weights before its forward pass, and release them after it."""

    def empty(*_: Any) -> None:
        for owner, key, parameter in parameters_in(layer):
            hollow = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            if hasattr(parameter, "placement"):
                place(hollow, placement_of(parameter), 1)
            setattr(owner, key, hollow)

    layer.register_forward_pre_hook(lambda module, _: fill(module))
    if not keep:
        layer.register_forward_hook(empty)


def theirs(folder: HuggingFaceFolder, tokens: Tensor, at: Tensor, whole: bool) -> tuple[Tensor, str]:
    """Logits [rows, positions, vocabulary] of transformers, and its version."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = _loaded(folder) if whole else _streamed(folder)
        logits = model(tokens, logits_to_keep=at, use_cache=False).logits.float()
    except (MegastableError, MemoryError):
        raise
    except Exception as error:  # a version of transformers may raise anything
        raise CheckpointError(
            f"{folder.path}: transformers {transformers.__version__} cannot load it: {type(error).__name__}: {error}"
        ) from error
    return logits, str(transformers.__version__)


def _loaded(folder: HuggingFaceFolder) -> nn.Module:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, said = load(
        folder.path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True, local_files_only=True,
        trust_remote_code=False, output_loading_info=True,
    )  # fmt: skip
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = {str(name) for name in said.get(what) or ()} - {
            "lm_head.weight" if folder.config.tied else ""
        }
        if found:
            raise CheckpointError(
                f"{folder.path}: transformers say {what.replace('_', ' ')}: {sorted(found)[0]}"
            )
    loaded: nn.Module = model.eval()
    return loaded


def _streamed(folder: HuggingFaceFolder) -> nn.Module:
    """transformers' model with the weights of one layer at a time, if the whole does not fit into memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    there = set(folder.files) | ({"lm_head.weight"} if folder.config.tied else set())
    if missing := sorted(set(model.state_dict()) - there):
        raise CheckpointError(f"{folder.path}: transformers need the tensor {missing[0]}, which is missing")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its table is computed, not loaded

    def fill(prefix: str) -> Callable[[nn.Module], None]:
        def filling(module: nn.Module) -> None:
            for key, _ in list(module.named_parameters()):
                owner, _, last = key.rpartition(".")
                weight = nn.Parameter(folder.tensor(f"{prefix}.{key}").float(), requires_grad=False)
                setattr(module.get_submodule(owner), last, weight)

        return filling

    embedding = model.model.embed_tokens
    fill("model.embed_tokens")(embedding)
    if hasattr(embedding, "scalar_embed_scale"):  # of a Gemma 2: computed, too
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    fill("model.norm")(model.model.norm)
    if folder.config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        fill("lm_head")(model.lm_head)
    for number, layer in enumerate(model.model.layers):
        _lazily(layer, fill(f"model.layers.{number}"))
    streamed: nn.Module = model.eval()
    return streamed
