"""Load the model of a checkpoint of any layout in one process, without DeepSpeed and without a process group.

    model = load_plain(Path("runs/quickstart"))

The weights are the optimizer's fp32 masters, assembled tensor by tensor; the files are first verified against the
manifest.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megastable.base.errors import CheckpointError
from megastable.base.text import make_visible
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.config.rules import caps_logits
from megastable.config.tree import RunConfig
from megastable.model.experts import ExpertMLP
from megastable.model.gpt import GPT, Block, Head, set_updates
from megastable.model.kernels import PLAIN, Kernels
from megastable.parallel.sharding import placement_of, set_placement
from megastable.parallel.topology import TensorParallel

log = logging.getLogger(__name__)

CAPPED = Kernels(attention="reference")


class PlainModel(nn.Module):
    """A GPT for inference. run: its frozen recipe; step: of the checkpoint; fingerprint: xxh3-128 of its manifest,
    which covers all of its files."""

    def __init__(self, gpt: GPT, run: RunConfig, checkpoint: Path, step: int, fingerprint: str) -> None:
        super().__init__()
        self.gpt, self.run = gpt, run
        self.checkpoint, self.step, self.fingerprint = checkpoint, step, fingerprint

    @property
    def config(self) -> ModelConfig:
        return self.run.model

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def compute_hidden(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """tokens int64 [b, s] (segments: the document ordinal of each token, if attention stays inside) -> the head's
        inputs, [s, b, hidden]."""
        layer_output: Any = tokens if segments is None else (tokens, segments)
        for layer in self.gpt.children():
            if not isinstance(layer, Head):
                layer_output = layer(layer_output)
        assert isinstance(layer_output, Tensor)
        return layer_output

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., padded vocabulary] in the weights' dtype; columns from `vocabulary` on are padding."""
        return self.gpt.compute_logits(hidden)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """tokens int64 [b, s] -> fp32 logits [b, s, vocabulary]."""
        padded_logits = self.compute_logits(self.compute_hidden(tokens, segments)).transpose(0, 1)
        return padded_logits[..., : self.vocabulary].float()


def load_plain(
    checkpoint: Path, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
) -> PlainModel:
    """The model of a checkpoint: RUN/checkpoints/step-N or latest, or a run directory: its newest good one.

    Memory: the weights once, in `dtype` (None: bf16 if the run trains in bf16, else fp32) on `device`, and one tensor
    in fp32. Raises CheckpointError for a checkpoint that is missing, damaged or of another model, ConfigError for an
    unreadable recipe.
    """
    checkpoint_path = find_checkpoint(checkpoint)
    run = run_of(checkpoint_path)
    if dtype is None:
        dtype = torch.bfloat16 if run.precision.kind == "bf16" else torch.float32
    gpt = without_weights(run.model, torch.device(device))
    _fill(gpt, run.model, checkpoint_path, dtype, torch.device(device))
    set_updates(gpt, run.model, store.read_state(checkpoint_path).updates)
    model = PlainModel(
        gpt,
        run,
        checkpoint_path,
        store.read_contents(checkpoint_path).step,
        hash_file(checkpoint_path / store.MANIFEST).xxh3,
    )
    return model.eval()


def without_weights(config: ModelConfig, device: torch.device) -> GPT:
    """The model on the meta device, with kernels that compute it on `device`: its initial weights are not drawn."""
    capped = config.attention_softcap is not None and not caps_logits(PLAIN.attention, device.type)
    with torch.device("meta"):
        return GPT(config, TensorParallel(), recompute="none", seed=None, kernels=CAPPED if capped else PLAIN)


def experts_in(gpt: GPT) -> dict[int, ExpertMLP]:
    """The routed experts of a whole model, by block."""
    blocks = (module for module in gpt.modules() if isinstance(module, Block))
    return {number: block.mlp for number, block in enumerate(blocks) if isinstance(block.mlp, ExpertMLP)}


def set_biases(gpt: GPT, biases: Tensor | None, device: torch.device) -> None:
    """Give every router of a whole model its bias of the choice. biases: fp32 [layers, experts]; None: without."""
    for block, mlp in experts_in(gpt).items():
        mlp.bias = None if biases is None else biases[block].to(device)


def find_checkpoint(path: Path) -> Path:
    """The folder of the checkpoint that `path` names (see `load_plain`), verified against its manifest."""
    path = recipe.find_recipe(path)
    if path.name == store.LATEST:
        latest_name = store.read_latest(path.parent)
        if not latest_name or not (path.parent / latest_name).is_dir() or "/" in latest_name:
            problem = (
                f"names {latest_name!r}, which is not there"
                if latest_name
                else "cannot be read: name a checkpoint"
            )
            raise CheckpointError(f"{path} {problem}{store.describe_others(path.parent)}")
        return _verified(path.parent / latest_name)
    if (path / store.STATE).exists() or path.name.startswith("step-"):
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such checkpoint{store.describe_others(path.parent)}")
        return _verified(path)
    checkpoints_folder = path if path.name == "checkpoints" else path / "checkpoints"
    if not checkpoints_folder.is_dir():
        raise CheckpointError(
            f"{path} is neither a checkpoint nor the directory of a run: give one such as runs/quickstart, or "
            "runs/quickstart/checkpoints/step-200"
        )
    last_problem = "it holds none"
    for candidate in store.newest_first(checkpoints_folder):
        try:
            return _verified(candidate)
        except CheckpointError as error:
            last_problem = str(error)
            log.warning("passed over: %s", make_visible(last_problem))
    raise CheckpointError(f"{checkpoints_folder}: no checkpoint there can be used: {last_problem}")


def _verified(path: Path) -> Path:
    store.verify_checkpoint(path)
    return path


def _fill(gpt: GPT, model: ModelConfig, checkpoint: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Fill an empty model with the weights of a checkpoint."""
    whole_state = WholeState(checkpoint)
    whole_state.check_fits(model)
    set_biases(gpt, whole_state.biases, device)
    for module in gpt.modules():
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            placement = placement_of(parameter)
            whole_weight = whole_state.read_tensor(placement.name, "weight")
            try:
                filled_parameter = nn.Parameter(whole_weight.to(device, dtype))
            except torch.OutOfMemoryError as error:
                raise CheckpointError(
                    f"{checkpoint}: its weights do not fit on {device}: {str(error).splitlines()[0]}"
                ) from None
            set_placement(filled_parameter, placement, 1)
            setattr(module, parameter_name, filled_parameter)
