"""Check that an exported folder computes the same as the checkpoint, by the logits of both in fp32.

Ours come from the training model, with the checkpoint's weights rounded to the folder's precision (so that one
limit serves an fp32 and a bf16 export); theirs from transformers. A wrong layout of the rotary embeddings shows here,
but not in sampled text.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from megastable.base import free_memory
from megastable.base.errors import CheckpointError, MegastableError
from megastable.base.process import install_command
from megastable.base.text import count_noun, show_size
from megastable.checkpoint import store
from megastable.checkpoint.plain import PlainModel, experts_in, set_biases, without_weights
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config.model import ExpertsConfig, ModelConfig
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.tokenizer import NO_EOD, load_tokenizer
from megastable.model.experts import choose_experts
from megastable.model.gpt import GPT
from megastable.parallel.sharding import placement_of, set_placement
from megastable.report.sheet import Column, Sheet
from megastable_tools.convert.huggingface.architectures import (
    OWN,
    OWN_OF_EXPERTS,
    architecture_of,
    factor_of,
    map_biases,
    map_tensor_names,
    merge_tensors,
    split_tensor,
    without_mup,
)
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder, parameters_in
from megastable_tools.convert.huggingface.tokenizer_export import real_text

LARGEST = 1e-4  # difference of two logits
KL = 1e-10  # nats per token, the mean
ROWS = 2  # of random tokens, and of text
LENGTH = 512  # tokens of a row, at most
WORK = 4e12  # approximate multiply-adds of one model; larger models get less text
LOGITS = 1 << 27  # bytes of fp32 logits per model; positions are left out to stay below
# Model keys whose values are compared by the report: logits need not show a difference.
NUMBERS = (
    "rope_theta", "rope_scaling", "norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "window",
)  # fmt: skip
# Properties of ModelConfig that hold for a key that was left out.
EFFECTIVE = {
    "kv_heads": "key_value_heads", "head_dim": "head_width", "ffn": "ffn_width", "attention_scale": "score_scale",
    "embedding_scale": "embedding_factor",
}  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True)
class LogitRow:
    """tokens: positions compared; largest: absolute difference of two logits; kl: of theirs from ours, nats per token,
    the mean; agree: share of positions with the same likeliest token; scale: the largest logit."""

    of: str
    tokens: int
    largest: float
    kl: float
    agree: float
    scale: float

    @property
    def same(self) -> bool:
        return self.largest < LARGEST and self.kl < KL


@dataclass
class ParityReport:
    """why: the reason why logits were not compared, "" if they were. unequal: tensors of the folder whose bits differ
    from the checkpoint's; settings: differences of config.json that logits need not show; precision: the folder's; how:
    how transformers loaded the weights."""

    checkpoint: Path
    folder: Path
    rows: list[LogitRow] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    tensors: int = 0
    precision: str = ""
    how: str = ""
    transformers: str = ""
    why: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Compared, and different."""
        return bool(self.unequal or self.settings) or not all(logit_row.same for logit_row in self.rows)

    @property
    def verdict(self) -> str:
        if self.why and not self.failed:
            return f"NOT CHECKED: {self.why}. All {self.tensors} tensors are the same, bit for bit"
        if not self.failed:
            return (
                f"the same: all {self.tensors} tensors bit for bit, differences of logits below {LARGEST:g}, "
                f"KL divergence below {KL:g}"
            )
        problem_texts = list(self.settings)
        if self.unequal:
            problem_texts.append(
                f"{len(self.unequal)} of {self.tensors} tensors differ, the first is {self.unequal[0]}"
            )
        for row in self.rows:
            if not row.same:
                problem_texts.append(
                    f"on {row.of} logits differ by up to {row.largest:.3g} (limit {LARGEST:g}), KL divergence "
                    f"{row.kl:.3g} (limit {KL:g})"
                )
        return f"NOT THE SAME: {'; '.join(problem_texts)}"

    @property
    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"same": not self.failed and not self.why, "verdict": self.verdict}


def compare_logits(
    checkpoint: Path, folder: Path, say: Say = lambda _: None, accept: Collection[str] = (),
    drop_expert_bias: bool = False,
) -> ParityReport:  # fmt: skip
    """checkpoint: a verified folder step-N; accept: as for `HuggingFaceFolder`. drop_expert_bias: compare without the
    bias of the choice of experts, if the folder's architecture has none, and note how many choices that changes.

    Raises CheckpointError, ConfigError."""
    theirs, run = HuggingFaceFolder(folder, accept), run_of(checkpoint)
    plain_model = without_mup(run.model)
    named_biases, whole_state = map_biases(theirs.config), WholeState(checkpoint)
    tensor_count = sum(map(len, theirs.parts.values())) + len(named_biases)
    found = ParityReport(checkpoint, folder, tensors=tensor_count)
    for model_key in ModelConfig.model_fields:
        mine, other = _effective(plain_model, model_key), _effective(theirs.config, model_key)
        if mine == other or model_key in OWN or model_key == "full_attention_every":
            continue
        if model_key not in NUMBERS:
            raise CheckpointError(
                f"{theirs.path} is a different model from {checkpoint}: model.{model_key} is {other} in the folder, "
                f"{mine} in the checkpoint"
            )
        found.settings.append(f"model.{model_key} is {other} in the folder, and {mine} in the checkpoint")
    held = {theirs.dtype_of(row_part.name) for row_parts in theirs.parts.values() for row_part in row_parts}
    found.precision = ", ".join(sorted(str(held_dtype).removeprefix("torch.") for held_dtype in held))
    rounded_weights = _Rounded(whole_state, run.model, theirs)
    bias_problem = find_bias_problem(whole_state.biases, plain_model)
    if bias_problem and not drop_expert_bias:
        found.settings.append(bias_problem)
    biases = rounded_weights.round_biases()
    token_samples = _samples(run, theirs, found.notes)
    whole, streamed_bytes = _memory(theirs, token_samples)
    free_bytes = free_memory.free_bytes()
    if importlib.util.find_spec("transformers") is None:
        install_text = install_command("hf")
        found.why = f"transformers, which the check needs, is not installed: {install_text}, then run `check`"
    elif streamed_bytes > free_bytes:
        found.why = (
            f"it would take {show_size(streamed_bytes)} of memory, but {show_size(free_bytes)} are free: run `check` "
            "on a larger machine"
        )
    if found.why:
        for tensor_name in rounded_weights.table:
            rounded_weights(tensor_name)
        found.unequal = sorted(rounded_weights.unequal)
        return found
    all_tokens = torch.cat([sample_tokens for _, sample_tokens in token_samples])
    at = _positions(all_tokens, theirs)
    # Not inference_mode: the table of positions that the model keeps is used with gradients, too.
    with torch.no_grad():
        say("our logits")
        dropped = _DroppedBias(whole_state.biases) if bias_problem else None
        mine = compute_our_logits(run, checkpoint, rounded_weights, all_tokens, at, biases, dropped)
        if dropped is not None:
            found.notes.append(f"without the bias {dropped.share:.2%} of the choices of experts are others")
        found.unequal = sorted(rounded_weights.unequal)
        say("logits of transformers")
        found.how = "loaded whole" if whole <= free_bytes else "loaded layer by layer, for want of memory"
        other, found.transformers = compute_their_logits(theirs, all_tokens, at, whole <= free_bytes)
    first = 0
    for of, rows in token_samples:
        found.rows.append(_row(of, mine[first : first + len(rows)], other[first : first + len(rows)]))
        first += len(rows)
    return found


def _effective(config: ModelConfig, key: str) -> Any:
    """What a key amounts to, also where it is left out."""
    if key == "experts" and config.experts is not None:
        return config.experts.model_dump(exclude=set(OWN_OF_EXPERTS)) | {"ffn": config.expert_width}
    if key == "ffn" and config.experts_of(0) is not None:  # no block has a dense MLP
        return None
    if key == "window":
        return [config.window_of(block_number) for block_number in range(config.layers)]
    return getattr(config, EFFECTIVE.get(key, key))


def _samples(run: RunConfig, folder: HuggingFaceFolder, notes: list[str]) -> list[tuple[str, Tensor]]:
    """Tokens to compare on: (description, int64 [rows, length])."""
    vocabulary = folder.config.vocab_size
    assert vocabulary is not None
    token_budget = int(WORK / (2 * folder.numel) / (2 * ROWS))
    row_length = min(run.model.sequence_length, folder.config.sequence_length, LENGTH, max(32, token_budget))
    random_source = torch.Generator().manual_seed(0)
    found = [("random tokens", torch.randint(vocabulary, (ROWS, row_length), generator=random_source))]
    try:
        corpora = open_corpora(run.data.corpora, row_length, run.run.seed, validation=run.data.validation)
        if corpora.validation is not None:
            text = torch.from_numpy(corpora.validation.read_samples(np.arange(ROWS)))[:, :-1]
            if int(text.max()) < vocabulary:
                return [*found, ("text of the validation corpus", text)]
    except (MegastableError, IndexError):
        pass  # the corpora need not be on this machine
    try:
        token_ids = load_tokenizer(folder.path, NO_EOD).encode(real_text())
    except MegastableError:
        notes.append("compared on random tokens alone: neither the run's corpora nor a tokenizer were found")
        return found
    rows = min(ROWS, len(token_ids) // row_length)
    text = torch.tensor(token_ids[: rows * row_length]).view(rows, row_length)
    if rows and int(text.max()) < vocabulary:
        found.append(("text of Python's own library", text))
    return found


def _memory(folder: HuggingFaceFolder, samples: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """Bytes that transformers need with the whole model, and layer by layer."""
    c, tokens = folder.config, torch.cat([sample_tokens for _, sample_tokens in samples])
    rows, length = tokens.shape
    # Activations of a layer: its MLP, and scores of attention; logits of both, and what is computed from them.
    widest_mlp = c.ffn_width
    if (experts := c.experts) is not None:
        widest_mlp = max(widest_mlp, c.expert_width * (experts.top_k + experts.shared))
    scores, answers = rows * c.heads * length**2, len(_positions(tokens, folder)) * rows * (c.vocab_size or 0)
    activation_bytes = 4 * (tokens.numel() * (6 * c.hidden + 4 * widest_mlp) + 3 * scores + 6 * answers)
    outside_bytes = 4 * c.hidden * (c.vocab_size or 0) * 2
    layer = (4 * folder.numel - outside_bytes // (2 if c.tied else 1)) // c.layers
    return int(1.1 * 4 * folder.numel) + activation_bytes, outside_bytes + 2 * layer + activation_bytes


def _positions(tokens: Tensor, folder: HuggingFaceFolder) -> Tensor:
    """The positions of a row to compare: all, or as many as fit, evenly spaced, with the last."""
    row_count, row_length = tokens.shape
    most_positions = max(1, min(row_length, LOGITS // (4 * (folder.config.vocab_size or 1) * row_count)))
    return torch.linspace(row_length - 1, 0, most_positions).round().long().flip(0)


class _Rounded:
    """The checkpoint's weights, times muP's scales if `model` has them, rounded as the folder should hold them; records
    the tensors that differ."""

    def __init__(self, whole: WholeState, model: ModelConfig, folder: HuggingFaceFolder) -> None:
        self.whole, self.model, self.folder, self.unequal = whole, model, folder, set[str]()
        self.table = map_tensor_names(folder.config)

    def __call__(self, name: str) -> Tensor:
        """fp32, with the padding of the vocabulary unchanged; for our model, so without those scales."""
        our_tensor, row_parts = self.whole.read_tensor(name, "weight"), self.table[name]
        scale_factor = factor_of(name, self.model)
        if scale_factor != 1:
            our_tensor = our_tensor * scale_factor
        rounded_parts = {}
        for their_name, row_part in split_tensor(our_tensor, row_parts).items():
            held = self.folder.read_tensor(their_name)
            if held.dtype == torch.float64:  # converted on reading
                held = held.float()
            mine = row_part.to(held.dtype)
            if not torch.equal(mine.view(torch.uint8), held.view(torch.uint8)):  # -0.0 is not 0.0, nan is nan
                self.unequal.add(their_name)
            rounded_parts[their_name] = mine.float()
        rounded_whole = merge_tensors(rounded_parts, row_parts, len(our_tensor))
        return rounded_whole if scale_factor == 1 else rounded_whole / scale_factor

    def round_biases(self) -> Tensor | None:
        """The checkpoint's bias of the choice of experts, fp32 [layers, experts], as the folder should hold it."""
        named_biases, biases = map_biases(self.folder.config), self.whole.biases
        if not named_biases:
            return None
        assert self.folder.config.experts is not None
        rounded_biases = torch.zeros(self.folder.config.layers, self.folder.config.experts.count)
        for block, bias in named_biases.items():
            held = self.folder.read_tensor(bias.name)
            mine = torch.zeros_like(held) if biases is None else biases[block].to(held.dtype)
            if not torch.equal(mine.view(torch.uint8), held.view(torch.uint8)):
                self.unequal.add(bias.name)
            rounded_biases[block] = mine
        return rounded_biases


def find_bias_problem(biases: Tensor | None, model: ModelConfig) -> str:
    """Why the architecture of `model` cannot have the bias of a checkpoint's routers; "" if it can, or it is 0."""
    if biases is None or not biases.any() or map_biases(model):
        return ""
    largest_place = int(biases.abs().argmax())
    block_number, expert_number = divmod(largest_place, biases.shape[1])
    largest_bias = float(biases[block_number, expert_number])
    return (
        f"its routers choose experts by a bias, the largest is {largest_bias:.3g} (block {block_number}, expert "
        f"{expert_number}), and {architecture_of(model).name} has none"
    )


class _DroppedBias:
    """Counts the choices of experts that a bias changes, where the model goes without it."""

    def __init__(self, biases: Tensor | None) -> None:
        assert biases is not None
        self.biases, self.changed, self.choices = biases, 0, 0

    def watch_routers(self, gpt: GPT) -> None:
        for block, mlp in experts_in(gpt).items():
            mlp.router.register_forward_hook(partial(self._count, mlp.config, self.biases[block]))

    def _count(self, config: ExpertsConfig, bias: Tensor, _: nn.Module, __: Any, logits: Tensor) -> None:
        without, with_it = (choose_experts(logits, used, config).chosen for used in (None, bias))
        is_kept = (without.unsqueeze(-1) == with_it.unsqueeze(-2)).any(-1)
        self.changed += int((~is_kept).sum())
        self.choices += is_kept.numel()

    @property
    def share(self) -> float:
        return self.changed / self.choices


def _row(of: str, ours: Tensor, theirs: Tensor) -> LogitRow:
    """ours, theirs: fp32 [rows, positions, vocabulary]."""
    our_rows, their_rows = ours.flatten(0, 1), theirs.flatten(0, 1)
    if our_rows.shape != their_rows.shape:
        raise CheckpointError(f"transformers give logits {tuple(theirs.shape)}, ours are {tuple(ours.shape)}")
    largest = largest_logit = kl_sum = 0.0
    for a, their_chunk in zip(our_rows.split(64), their_rows.split(64), strict=True):
        our_logprobs, their_logprobs = a.double().log_softmax(-1), their_chunk.double().log_softmax(-1)
        kl_sum += float((our_logprobs.exp() * (our_logprobs - their_logprobs)).sum())
        difference = (a - their_chunk).abs()
        # max() of Python would drop a nan.
        largest = max(largest, float(difference.max())) if bool(difference.isfinite().all()) else math.nan
        largest_logit = max(largest_logit, float(a.abs().max()))
        if math.isnan(largest):
            break
    agreement_share = float((our_rows.argmax(-1) == their_rows.argmax(-1)).double().mean())
    # max() of Python would make 0 of a nan.
    kl_divergence = math.nan if math.isnan(largest) else float(np.maximum(0.0, kl_sum / len(our_rows)))
    return LogitRow(of, len(our_rows), largest, kl_divergence, agreement_share, largest_logit)


def make_parity_sheet(found: ParityReport) -> Sheet:
    """The report as a table."""
    facts = [
        ("checkpoint", str(found.checkpoint)),
        ("folder", str(found.folder)),
        ("weights there", found.precision),
    ]
    if found.rows:
        facts.append(("transformers", f"{found.transformers}, {found.how}"))
    facts.append(("tensors", f"{count_noun(found.tensors, 'tensor')}, {len(found.unequal)} different"))
    columns = (
        Column("of", "compared on"), Column("tokens", "positions", "count"),
        Column("largest", "largest difference", "text"), Column("kl", "KL, nats/token", "text"),
        Column("agree", "same likeliest token", "share"), Column("scale", "largest logit", "number"),
    )  # fmt: skip
    rows = [vars(row) | {"largest": f"{row.largest:.3g}", "kl": f"{row.kl:.3g}"} for row in found.rows]
    notes = list(found.notes)
    if found.rows:
        held = "Both in fp32, the checkpoint's weights rounded to what the folder holds."
        notes.append(f"{held} Limits: {LARGEST:g}, {KL:g}.")
    return Sheet(found.verdict, facts=facts, columns=columns, rows=rows, notes=notes)


# Logits of our model and of transformers' on the same tokens, in fp32; layer by layer if memory is short


def compute_our_logits(
    run: RunConfig, checkpoint: Path, weights: Callable[[str], Tensor], tokens: Tensor, at: Tensor,
    biases: Tensor | None, dropped: _DroppedBias | None,
) -> Tensor:  # fmt: skip
    """Logits [rows, positions, vocabulary] of our model; one layer's weights are in memory at a time. biases: of the
    choice of experts, fp32 [layers, experts]; dropped: counts what one would change."""
    empty_model = without_weights(run.model, torch.device("cpu"))
    set_biases(empty_model, biases, torch.device("cpu"))
    if dropped is not None:
        dropped.watch_routers(empty_model)
    model = PlainModel(empty_model, run, checkpoint, store.step_of(checkpoint), "").eval()

    def fill(layer: nn.Module) -> None:
        for owner_module, parameter_key, model_parameter in parameters_in(layer):
            parameter_placement = placement_of(model_parameter)
            filled_parameter = nn.Parameter(weights(parameter_placement.name), requires_grad=False)
            set_placement(filled_parameter, parameter_placement, 1)
            setattr(owner_module, parameter_key, filled_parameter)

    for layer_number, layer in enumerate(empty_model.children()):
        _lazily(layer, fill, keep=layer_number == 0 and run.model.tied)
    hidden_states = model.compute_hidden(tokens)[at]
    return model.compute_logits(hidden_states).transpose(0, 1)[..., : model.vocabulary].float()


def _lazily(layer: nn.Module, fill: Callable[[nn.Module], None], keep: bool = False) -> None:
    """Fill a layer's weights before its forward pass, and release them after it."""

    def empty(*_: Any) -> None:
        for owner_module, parameter_key, model_parameter in parameters_in(layer):
            hollow = nn.Parameter(torch.empty_like(model_parameter, device="meta"), requires_grad=False)
            if hasattr(model_parameter, "placement"):
                set_placement(hollow, placement_of(model_parameter), 1)
            setattr(owner_module, parameter_key, hollow)

    layer.register_forward_pre_hook(lambda module, _: fill(module))
    if not keep:
        layer.register_forward_hook(empty)


def compute_their_logits(
    folder: HuggingFaceFolder, tokens: Tensor, at: Tensor, whole: bool
) -> tuple[Tensor, str]:
    """Logits [rows, positions, vocabulary] of transformers, and its version."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        their_model = _loaded(folder) if whole else _streamed(folder)
        model_logits = their_model(tokens, logits_to_keep=at, use_cache=False).logits.float()
    except (MegastableError, MemoryError):
        raise
    except Exception as error:  # a version of transformers may raise anything
        raise CheckpointError(
            f"{folder.path}: transformers {transformers.__version__} cannot load it: {type(error).__name__}: {error}"
        ) from error
    return model_logits, str(transformers.__version__)


def _loaded(folder: HuggingFaceFolder) -> nn.Module:
    from transformers import AutoModelForCausalLM

    load_model: Any = AutoModelForCausalLM.from_pretrained
    loaded_model, loading_info = load_model(
        folder.path, dtype=torch.float32, attn_implementation="eager", use_safetensors=True, local_files_only=True,
        trust_remote_code=False, output_loading_info=True,
    )  # fmt: skip
    for problem_kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found = set(map(str, loading_info.get(problem_kind) or ()))
        if folder.config.tied:
            found.discard("lm_head.weight")
        if found:
            raise CheckpointError(
                f"{folder.path}: transformers say {problem_kind.replace('_', ' ')}: {sorted(found)[0]}"
            )
    return cast(nn.Module, loaded_model.eval())


def _streamed(folder: HuggingFaceFolder) -> nn.Module:
    """transformers' model with the weights of one layer at a time, if the whole does not fit into memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        make_model: Any = AutoModelForCausalLM.from_config
        model = make_model(config, attn_implementation="eager", dtype=torch.float32)
    present_names = set(folder.files) | ({"lm_head.weight"} if folder.config.tied else set())
    their_names = {name for key in model.state_dict() for row in _list_tensors(folder, key) for name in row}
    if missing := sorted(their_names - present_names):
        raise CheckpointError(f"{folder.path}: transformers need the tensor {missing[0]}, which is missing")
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)  # its table is computed, not loaded

    def fill(prefix: str, module: nn.Module) -> None:
        held_keys = module.state_dict().keys()  # without buffers that are computed
        tensors = (*module.named_parameters(), *module.named_buffers())
        for key, of in [named for named in tensors if named[0] in held_keys]:
            owner_module, _, parameter_name = key.rpartition(".")
            name_rows = _list_tensors(folder, f"{prefix}.{key}")
            read_rows = [torch.cat([folder.read_tensor(name).float() for name in row]) for row in name_rows]
            own_tensor = torch.stack(read_rows) if len(read_rows) > 1 else read_rows[0]
            if isinstance(of, nn.Parameter):
                own_tensor = nn.Parameter(own_tensor, requires_grad=False)
            setattr(module.get_submodule(owner_module), parameter_name, own_tensor)

    embedding_module = model.model.embed_tokens
    fill("model.embed_tokens", embedding_module)
    if hasattr(embedding_module, "scalar_embed_scale"):  # of a Gemma 2: computed, too
        embedding_module.embed_scale = torch.tensor(embedding_module.scalar_embed_scale)
    fill("model.norm", model.model.norm)
    if folder.config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        fill("lm_head", model.lm_head)
    for layer_number, layer in enumerate(model.model.layers):
        _lazily(layer, partial(fill, f"model.layers.{layer_number}"))
    return cast(nn.Module, model.eval())


def _list_tensors(folder: HuggingFaceFolder, key: str) -> list[list[str]]:
    """The folder's tensors that are one of transformers' parameters or buffers: it is one, or, of experts, a stack of
    what each has, one below the other."""
    expert_names, experts = architecture_of(folder.config).experts, folder.config.experts
    if expert_names is None or experts is None:
        return [[key]]
    own_key = key.replace(".mlp.", f".{expert_names.module}.")
    block_key, _, fused_key = own_key.rpartition(".experts.")
    gate_up, down = expert_names.linears[:2], expert_names.linears[2:]
    fused_linears = {"gate_up_proj": gate_up, "down_proj": down}.get(fused_key)
    if fused_linears is None:
        return [[own_key]]
    return [
        [f"{block_key}.experts.{n}.{linear}.weight" for linear in fused_linears] for n in range(experts.count)
    ]
