"""Import a checkpoint written by DeepSpeed itself as a new run: weights, Adam's moments and step.

    import_deepspeed(Path("old/checkpoints"), Path("runs/new"), run, print)

The parameters may have the names of our layers ("1.attention.qkv.weight": older runs, and other code that trains our
model), or those of Hugging Face's architectures (architectures.py), after any common prefix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.text import visible
from megastable.checkpoint.new_run import ADAM, refuse_existing, write_run
from megastable.checkpoint.whole import Described, parameters
from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.flatstate import KINDS
from megastable.model.gpt import GPT
from megastable.optim.build import ADAMS
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel
from megastable_tools.convert.foreign import unpickle
from megastable_tools.convert.foreign.begin import state_of, with_vocabulary
from megastable_tools.convert.foreign.zero import ZeroState
from megastable_tools.convert.huggingface.architectures import EVERYWHERE, OWN
from megastable_tools.convert.huggingface.names import TensorRows, merge, table

Parts = Mapping[str, tuple[TensorRows, ...]]


@dataclass(frozen=True)
class Naming:
    """whose: naming scheme, for people; parts: the foreign tensors of each of our parameters."""

    whose: str
    parts: Parts


def import_deepspeed(folder: Path, out: Path, run: RunConfig, say: Callable[[str], None]) -> Path:
    """Make the run directory `out` from DeepSpeed's checkpoint: `folder` with `latest`, or one global_step*/. Returns
    the checkpoint's folder.

    run: the new run's recipe; its model must be the checkpoint's. Moments are imported if all weights have them and the
    recipe's optimizer continues from Adam's; the data starts at 0, unless client_state holds a "cursor". Raises
    CheckpointError, ConfigError, DataError; then nothing of `out` is left.
    """
    refuse_existing(out)
    source = find(folder)
    state = ZeroState(source)
    say(
        f"warning: {source}: DeepSpeed writes no checksums and no list of files for a checkpoint: it can be checked "
        "for consistency, but not whether it is complete and unchanged"
    )
    run = with_vocabulary(run)
    held = parameters(run.model)
    naming, prefix = naming_of(run.model, held, state, source)
    optimizer = state.kinds == KINDS and run.optimizer.name in ADAMS
    why = f"{run.optimizer.name} cannot continue from them" if state.kinds == KINDS else "they start at zero"
    say(
        f"{source}: ZeRO {state.stage}, step {state.steps}, parameters named as {naming.whose}, "
        + ("with Adam's moments" if optimizer else f"without Adam's moments: {why}")
    )
    say(f"note: {source}: it does not contain settings of the model: using the recipe's, {unseen(run.model)}")

    def whole(name: str, kind: str) -> Tensor:
        parts = {part.name: state.tensor(prefix + part.name, kind) for part in naming.parts[name]}
        return merge(parts, naming.parts[name], held[name].shape[0])

    cursor = unpickle.number(state.client.get("cursor")) or 0
    updates = int(max(state.adam_step or state.steps - state.skipped, 0))
    at = state_of(
        run,
        step=state.steps,
        updates=updates,
        trained_tokens=run.batches.reach(0, updates) * run.model.sequence_length,  # as if by this recipe
        cursor=int(max(cursor, 0)),
        adam_step=state.adam_step,
        scaler={"cur_scale": state.loss_scale} if run.precision.kind == "fp16" and state.loss_scale else {},
    )
    origin = {"source": str(source), "how": "imported from DeepSpeed", "steps": state.steps}
    return write_run(out, run, at, whole, optimizer=ADAM if optimizer else None, origin=origin)


def unseen(config: ModelConfig) -> str:
    """The model keys that names and shapes do not show: the usual ones, and choices other than the defaults."""
    c, fields = config, ModelConfig.model_fields.items()
    seen = OWN | EVERYWHERE | {"qk_norm", "qkv_bias"}
    chosen = {
        key: getattr(c, key) for key, field in fields if key not in seen and getattr(c, key) != field.default
    }
    usual = {"heads": c.heads, "kv_heads": c.key_value_heads, "rope_theta": f"{c.rope_theta:g}",
             "norm_eps": f"{c.norm_eps:g}"}  # fmt: skip
    scaled = {"rope_scaling": f"({c.rope_scaling})"} if c.rope_scaling else {}
    return " ".join(f"{key}={value}" for key, value in (usual | scaled | chosen).items())


def find(folder: Path) -> Path:
    """The folder with the files: `folder` itself, the one that its `latest` names, or the only global_step*/ in it."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    latest = folder / "latest"
    steps = sorted(path for path in folder.glob("global_step*") if path.is_dir())
    if any(folder.glob("*_model_states.pt")):
        return folder
    if latest.is_file():
        try:
            tag = latest.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{latest}: cannot be read: {error}") from None
        if not tag or "/" in tag or tag in (".", "..") or not (folder / tag).is_dir():
            there = f"; there are {', '.join(visible(path.name) for path in steps)}" if steps else ""
            raise CheckpointError(f"{latest} names {visible(tag, 100)!r}, which is not there{there}")
        return folder / tag
    if len(steps) == 1:
        return steps[0]
    if steps:
        raise CheckpointError(
            f"{folder}: holds several checkpoints and no `latest`: name one, such as {steps[-1]}"
        )
    return folder


def naming_of(
    config: ModelConfig, held: Mapping[str, Described], state: ZeroState, where: Path
) -> tuple[Naming, str]:
    """The naming scheme of the checkpoint's parameters, and the prefix of the names. All must belong to the model.

    Raises CheckpointError for the first parameter that is missing, left over or of another shape.
    """
    namings = [Naming("our layers", _own(config, held))]
    with contextlib.suppress(ConfigError):  # no Hugging Face architecture matches this model
        namings.append(Naming("Hugging Face's", table(config)))
    names = state.shapes
    for naming in namings:
        anchor = next(iter(naming.parts.values()))[0].name
        # The shortest: "0.weight" is also the end of other names.
        for found in sorted((n for n in names if n == anchor or n.endswith(f".{anchor}")), key=len):
            prefix = found.removesuffix(anchor)
            if all(n.startswith(prefix) for n in names):
                _check(naming.parts, held, state, prefix, where)
                return naming, prefix
    some = ", ".join(visible(name, 100) for name in list(names)[:3])
    known = " or ".join(f"{next(iter(n.parts.values()))[0].name!r} ({n.whose})" for n in namings)
    raise CheckpointError(
        f"{where}: its parameters are named {some}, ...: the supported models have names such as {known}"
    )


def _own(config: ModelConfig, held: Mapping[str, Described]) -> Parts:
    """Parameters by the module names of `GPT`, as DeepSpeed sees them."""
    with torch.device("meta"):
        gpt = GPT(config, TensorParallel(), recompute="none", seed=0)
    names = {placement_of(parameter).name: key for key, parameter in gpt.named_parameters()}
    return {name: (TensorRows(names[name], 0, of.shape),) for name, of in held.items()}


def _check(parts: Parts, held: Mapping[str, Described], state: ZeroState, prefix: str, where: Path) -> None:
    """Check that the checkpoint's parameters are those of `parts`, with their shapes."""
    wanted = {prefix + part.name: part for of in parts.values() for part in of}
    for name, part in wanted.items():
        shape = state.shapes.get(name)
        if shape is None:
            raise CheckpointError(
                f"{where}: {visible(name, 200)} is missing: the recipe's model is another one"
            )
        if shape != part.shape:
            raise CheckpointError(
                f"{where}: {visible(name, 200)} is {shape}, in the recipe's model {part.shape}: correct the recipe's "
                "model section"
            )
    if left := sorted(set(state.shapes) - set(wanted)):
        raise CheckpointError(
            f"{where}: {visible(left[0], 200)} has no home in the recipe's model ({len(left)} such): it is of another "
            "model"
        )
