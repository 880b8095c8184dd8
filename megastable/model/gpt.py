"""The GPT as a list of layers (embedding, blocks, final norm, head), used for one pipeline stage or many.

Blocks of attention and SwiGLU with RMSNorms (`Residual`); no biases, except those of q, k and v with `qkv_bias`.
Layers pass on x [s, b, hidden] (its sequence shard under sequence parallelism); (x, segments) if attention is
restricted to documents; (x, segments, keys) in training with dropout. Segments cover whole sequences, also where
context parallelism gives a rank only a part of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config.model import ModelConfig
from megastable.model.attention import Attention, Places
from megastable.model.block_parts import MLP, RMSNorm, drop_elements, keys_at_places
from megastable.model.cores import CORES
from megastable.model.elementwise import add_and_norm, norm_stream
from megastable.model.experts import ExpertMLP
from megastable.model.init import initialise_weights
from megastable.model.kernels import PLAIN, AttentionScores, Kernels
from megastable.model.loss import Features, LossFunction, project_features
from megastable.model.sizes import layer_costs
from megastable.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megastable.parallel.layout import cut_ranges
from megastable.parallel.mappings import enter_tensor_region, gather_tokens
from megastable.parallel.topology import WHOLE, ContextParallel, TensorParallel

GRAPHS = 64  # most for one code object, where blocks are compiled
Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Residual:
    """One block's: x [s, b, hidden] and a branch f, attention or MLP, give the new x.

    placement, with n the norm and m a second one:
    - "before": x + c f(n(x)) (Xiong et al., arXiv:2002.04745)
    - "after": x + c n(f(x)) (OLMo 2, arXiv:2501.00656, section 3; Swin v2, arXiv:2111.09883)
    - "both": x + c m(f(n(x))) (peri-LN, arXiv:2502.02732; Gemma 2, arXiv:2408.00118)
    - "sum": n(x + f(x)) (post-LN, arXiv:1706.03762)
    - "deep": n(a x + f(x)) with a = (2 layers)^(1/4) (DeepNorm, arXiv:2203.00555, section 3)
    - "branch": n(x + g f(x)), g growing from 0 to 1 (BranchNorm, arXiv:2305.02790, section 3)
    shortcut: a. branch: c, of depth transfer. norm: factor of n's result, of LayerNorm scaling.
    """

    placement: str
    shortcut: float = 1.0
    branch: float = 1.0
    norm: float = 1.0

    @classmethod
    def from_config(cls, config: ModelConfig, block: int) -> Residual:
        norm_placement = config.placement_of(block)
        return cls(
            norm_placement,
            shortcut=(2 * config.layers) ** 0.25 if norm_placement == "deep" else 1.0,
            branch=1 / config.depth_ratio,
            norm=(block + 1) ** -0.5 if config.norm_scaling else 1.0,
        )

    @property
    def norms_input(self) -> bool:
        """Whether attention and MLP get the result of a norm."""
        return self.placement in ("before", "both")

    @property
    def of_sum(self) -> bool:
        """Whether the norm is of the sum of stream and branch."""
        return self.placement in ("sum", "deep", "branch")

    def join_branch(
        self, x: Tensor, branch: Transform, norm: Transform, second: Transform | None, drop: Transform,
        grown: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """second: m. drop: dropout of what is added. grown: g, fp32 scalar."""
        if self.of_sum:
            y = branch(x)
            if grown is not None:
                y = (y * grown).to(x.dtype)
            return norm((x if self.shortcut == 1.0 else x * self.shortcut) + drop(y))
        y = branch(norm(x)) if self.norms_input else norm(branch(x))
        if second is not None:
            y = second(y)
        return x + drop(y if self.branch == 1.0 else y * self.branch)


# x, (x, segments) or (x, segments, keys); in the last one, segments of one dimension mean none.
Stream = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
Make = Callable[[Callable[[], nn.Module]], nn.Module]


def open_stream(stream: Stream) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, segments [b, s] and keys [b]."""
    if not isinstance(stream, tuple):
        return stream, None, None
    x, segments, *keys = stream
    return x, segments if segments.dim() > 1 else None, keys[0] if keys else None


def _with(stream: Stream, x: Tensor) -> Stream:
    """`stream` with x in place of its own."""
    return (x, *stream[1:]) if isinstance(stream, tuple) else x


class Embedding(VocabParallelEmbedding):
    """Tokens [b, s], or a stream of them -> x [s, b, hidden] times `factor`."""

    def __init__(
        self, vocabulary: int, hidden: int, tp: TensorParallel, name: str, factor: float = 1.0,
        cp: ContextParallel = WHOLE, dropout: float = 0.0, compiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(vocabulary, hidden, tp, name)
        self.factor, self.dropout = factor, dropout
        self.find_tokens = partial(_find_tokens, tp, cp)
        self.plain = False  # whether the compiled version is left aside
        # Not the table's look-up: what torch.compile makes of its gradient adds up in fp32, in any order.
        self._fast = torch.compile(self._finish, fullgraph=True, dynamic=False) if compiled else self._finish

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        tokens, _, dropout_keys = open_stream(inputs)
        x = super().forward(tokens)
        place_keys = (
            keys_at_places(dropout_keys, 0)[0] if self.training and dropout_keys is not None else None
        )
        if self.factor != 1.0 or place_keys is not None:
            x = (self._finish if self.plain else self._fast)(x, place_keys)
        return _with(inputs, x)

    def _finish(self, x: Tensor, keys: Tensor | None) -> Tensor:
        if self.factor != 1.0:
            x = x * self.factor
        return x if keys is None else drop_elements(x, keys, self.dropout, self.find_tokens(len(x)))


def _find_tokens(tp: TensorParallel, cp: ContextParallel, count: int) -> tuple[range, ...]:
    """Positions in the sample of the `count` tokens of this rank's shard of x."""
    shard_count, shard = (tp.size, tp.rank) if tp.sequence else (1, 0)
    own_tokens = cp.find_own_tokens(count * shard_count * cp.size)
    return cut_ranges(own_tokens, shard * count, (shard + 1) * count)


class Block(nn.Module):
    """Attention, then MLP, each joined to the residual stream as `Residual` says.

    The norms are called `attention_norm` and `mlp_norm`, wherever they are; those after attention and MLP of
    `norms=both` are `attention_post_norm` and `mlp_post_norm`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        index: int,
        recompute: str,
        kernels: Kernels = PLAIN,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.name = name = f"blocks.{index}"
        recomputes_core = recompute == "selective"
        self.recompute = recompute == "full"
        self.residual = residual = Residual.from_config(config, index)
        centered = config.zero_centered_norms
        make_norm = partial(
            RMSNorm, config.hidden, config.norm_eps, tp, partial=tp.sequence, centered=centered
        )
        self.attention_norm = make_norm(f"{name}.attention_norm", scale=residual.norm)
        scores = AttentionScores.from_config(config, index)
        self.attention = Attention(config, tp, f"{name}.attention", recomputes_core, kernels, cp, scores)
        self.mlp_norm = make_norm(f"{name}.mlp_norm", scale=residual.norm)
        self.own = self.attention.own
        experts, mlp_name = config.experts_of(index), f"{name}.mlp"
        self.mlp: MLP | ExpertMLP = (
            MLP(config, tp, mlp_name, recomputes_core, self.own)
            if experts is None
            else ExpertMLP(config, experts, tp, mlp_name, recomputes_core, self.own, cp, kernels.grouped)
        )
        has_post_norms = residual.placement == "both"
        self.attention_post_norm = make_norm(f"{name}.attention_post_norm") if has_post_norms else None
        self.mlp_post_norm = make_norm(f"{name}.mlp_post_norm") if has_post_norms else None
        # Of `norms=branch`: see `set_updates`; None: full size. Not a buffer, which would become bf16.
        self.grown: Tensor | None = None
        self._split = (tp.size if tp.sequence else 1) * cp.size
        self._index, self._dropout = index, config.dropout
        self._find_tokens = partial(_find_tokens, tp, cp)
        self.in_halves = False  # for hooks on its modules; see `_halves`
        self._fast, self._kernels = self._block, kernels
        # Compiled blocks are not used, nor own kernels; see `compute_plainly`.
        self._plain = self._without_own = False
        if kernels.compile:
            # All blocks share one code object: it is compiled once for training and once for evaluation, and for every
            # length and adjustment. Beyond torch's limit of 8 the run would end.
            torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
            compile_part = partial(torch.compile, fullgraph=kernels.whole_blocks, dynamic=False)
            if isinstance(self.mlp, ExpertMLP):
                # How many tokens an expert has differs from one micro-batch to the next.
                attended = compile_part(self._attend_half)
                self._fast = lambda x, at: self._fed(attended(x, at), at.keys, at.measured)
            else:
                self._fast = compile_part(self._block)

    def compile_in_pieces(self) -> None:
        """Exclude its linear layers from torch.compile; norms, and the code between them, are compiled separately, sums
        of the residual stream are not."""
        if not self._kernels.compile:
            return
        is_whole = self._kernels.whole_blocks
        compiled_between = torch.compile(self.attention.attend_between, fullgraph=is_whole, dynamic=False)
        self._fast = lambda x, at: self.run_around(
            x, lambda y: self.attention(y, at, compiled_between), at.keys, at.measured
        )
        for norm in self._list_norms():
            norm.compile_alone()
        if isinstance(self.mlp, MLP):
            self.mlp.fast = torch.compile(self.mlp.activate, fullgraph=is_whole, dynamic=False)

    def _list_norms(self) -> list[RMSNorm]:
        """Its norms; not those of attention's heads."""
        return [part for part in self.children() if isinstance(part, RMSNorm)]

    def compute_plainly(self, attention: bool, compiled: bool, own: bool, grouped: bool = False) -> None:
        """From the next step on, compute by plain PyTorch in place of a kernel that computes wrong numbers, or by the
        run's kernels again.

        Args:
            attention: Whether `plain` takes the place of the attention core. It is not compiled: nothing is then.
            compiled: Whether nothing is compiled. To take no more memory than compiled code does, blocks are
                recomputed then, and no own kernels are used either.
            own: Whether own kernels of elementwise work are left aside.
            grouped: Whether every expert is a product of its own.
        """
        if isinstance(self.mlp, ExpertMLP):
            self.mlp.grouped = self._kernels.grouped and not grouped
        self._without_own = own
        self._plain = (attention or compiled) and self._kernels.compile
        self.attention.core = CORES["plain" if attention else self._kernels.attention]
        for norm in self._list_norms():
            norm.plain = self._plain
        if isinstance(self.mlp, MLP):
            self.mlp.plain = self._plain

    def forward(self, stream: Stream) -> Stream:
        x, segments, dropout_keys = open_stream(stream)
        at = self._places(x, segments)
        if self.training and dropout_keys is not None:
            at = at._replace(keys=keys_at_places(dropout_keys, 1 + 2 * self._index, 2 + 2 * self._index))
        if isinstance(self.mlp, ExpertMLP) and self.training and torch.is_grad_enabled():
            at = at._replace(measured=self.mlp.begin_micro_batch(x.device))
        runs_halves = self.in_halves or self._plain
        self.own.aside = runs_halves or self._without_own
        run_block = self._halves if runs_halves else self._fast
        is_recomputed = (self.recompute or runs_halves) and torch.is_grad_enabled()
        return _with(stream, _recomputed(run_block, x, at) if is_recomputed else run_block(x, at))

    @torch.no_grad()
    def queries_and_keys(self, stream: Stream) -> tuple[Tensor, Tensor, list[int]]:
        """q [b, q, n, d] and k [b, k, s, d] at the attention core for `stream`, and the positions of the n queries:
        in a ring, this rank's. Computed separately from `forward`, which is unchanged. Collective over the tensor and
        the context group."""
        x, segments, _ = open_stream(stream)
        at = self._places(x, segments)
        # No name for the normed x: it would live on in memory while the heads are made.
        qkv = self.attention.qkv(self.attention_norm(x) if self.residual.norms_input else x)
        q, k, _ = self.attention.rotate_heads(qkv, at)
        length, cp = x.shape[0] * self._split, self.attention.cp
        if not cp.ring:
            return q, k, list(range(length))
        return q, gather_tokens(k, cp), list(chain(*cp.find_own_tokens(length)))

    @torch.no_grad()
    def compute_outputs(self, x: Tensor, segments: Tensor | None, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the products of qkv, of attention's projection and of the MLP give for the first `most` tokens of
        x [s, b, hidden], for all tokens where ranks share a sequence: [s, b, width / tensor], and twice x's shape.
        Computed separately from `forward`, not compiled. Collective over the tensor and the context group."""
        if self._split == 1:
            x, segments = x[:most], None if segments is None else segments[:, :most]
        hooked_outputs: list[Tensor] = []
        output_hooks = [
            module.register_forward_hook(lambda _, args, y: hooked_outputs.append(y))
            for module in (self.attention.qkv, self.attention, self.mlp)
        ]
        try:
            self._block(x, self._places(x, segments))
        finally:
            for output_hook in output_hooks:
                output_hook.remove()
        qkv, attention, mlp = hooked_outputs
        return qkv, attention, mlp

    def _places(self, x: Tensor, segments: Tensor | None) -> Places:
        return self.attention.find_places(x.shape[0] * self._split, segments, x.device)

    def _block(self, x: Tensor, at: Places) -> Tensor:
        return self.run_around(x, lambda y: self.attention(y, at), at.keys, at.measured)

    def _attend_half(self, x: Tensor, at: Places) -> Tensor:
        return self._attended(x, lambda y: self.attention(y, at), at.keys)

    def _halves(self, x: Tensor, at: Places) -> Tensor:
        """The block, not compiled, so that hooks on its modules run. As that saves twice the activations, it is
        recomputed in the backward pass, one half after the other."""
        attended_half = _recomputed(self._attend_half, x, at)
        return _recomputed(self._fed, attended_half, at.keys, at.measured)

    def run_around(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], keys: Tensor | None = None,
        measured: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The block with `attend` in place of its attention; `attend` maps x [s, b, hidden] to the same shape. keys:
        of dropout in both halves, int64 [2, b], if there is any. measured: see `ExpertMLP.forward`."""
        if self.own.has("norms"):
            x, normed_x = norm_stream(x, *self.attention_norm.tell_kernel())
            x, normed_x = add_and_norm(x, attend(normed_x), *self.mlp_norm.tell_kernel())
            return x + self._feed(normed_x, measured)
        return self._fed(self._attended(x, attend, keys), keys, measured)

    def _dropped(self, x: Tensor, keys: Tensor | None, half: int) -> Tensor:
        return x if keys is None else drop_elements(x, keys[half], self._dropout, self._find_tokens(len(x)))

    def _attended(self, x: Tensor, attend: Callable[[Tensor], Tensor], keys: Tensor | None) -> Tensor:
        norms = self.attention_norm, self.attention_post_norm
        return self.residual.join_branch(x, attend, *norms, lambda y: self._dropped(y, keys, 0), self.grown)

    def _fed(self, x: Tensor, keys: Tensor | None, measured: Tensor | None) -> Tensor:
        norms = self.mlp_norm, self.mlp_post_norm
        feed = partial(self._feed, measured=measured)
        return self.residual.join_branch(x, feed, *norms, lambda y: self._dropped(y, keys, 1), self.grown)

    def _feed(self, x: Tensor, measured: Tensor | None) -> Tensor:
        return self.mlp(x) if measured is None else self.mlp(x, measured)


def set_updates(module: nn.Module, config: ModelConfig, updates: int) -> None:
    """Set the factor of the branches of `norms=branch` to min(1, t / T), t = updates applied so far."""
    if config.norms == "branch":
        branch_share = min(1.0, updates / config.branch_steps)
        device = next(module.parameters()).device
        grown = torch.tensor(branch_share, dtype=torch.float32, device=device)
        for part in module.modules():
            if isinstance(part, Block):
                part.grown = grown


def _recomputed(run: Callable[..., Tensor], *args: Any) -> Tensor:
    # Dropout hashes what it is given: there is no random state to save and restore.
    y: Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    return y


class FinalNorm(RMSNorm):
    """The last norm; later layers need no segments."""

    def __init__(
        self, width: int, eps: float, tp: TensorParallel, name: str, partial: bool, centered: bool = False,
        compiled: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(width, eps, tp, name, partial, centered)
        if compiled:
            self.compile_alone()

    def forward(self, stream: Stream) -> Tensor:
        x, _, _ = open_stream(stream)
        return super().forward(x)


@dataclass(frozen=True)
class Readout:
    """How logits are made of x and the head's weight. scale: their factor (muP); cap: see `loss.project_features`."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: ModelConfig) -> Readout:
        return cls(1 / config.width_ratio, config.logit_softcap)

    def make_features(self, head: ColumnParallelLinear | VocabParallelEmbedding, x: Tensor) -> Features:
        """Inputs of the logits, for a head or the embedding of a tied model: x inside the tensor-parallel region, and
        the weight (a view: DeepSpeed's pipeline starts a backward pass by hooks on non-leaf tensors)."""
        x = enter_tensor_region(x, head.tp)
        return x if self.scale == 1.0 else x * self.scale, head.weight.view_as(head.weight)

    def project_features(self, given: Features) -> Tensor:
        return project_features(given, self.cap)

    def tied_head(self, embedding: VocabParallelEmbedding, x: Tensor) -> Tensor:
        """The head of a tied model: logits from the embedding's weight."""
        return self.project_features(self.make_features(embedding, x))


class Head(ColumnParallelLinear):
    """x [s, b, hidden] -> logits [s, b, padded vocabulary / tensor], or the result of `then` on the features."""

    def __init__(
        self, inputs: int, sections: Sequence[int], tp: TensorParallel, name: str, readout: Readout
    ) -> None:
        super().__init__(inputs, sections, tp, name)
        self.readout = readout

    def forward(self, x: Tensor, then: Callable[[Features], Any] | None = None) -> Any:
        # Called in here, because ZeRO 3 releases the weight afterwards.
        return (then or self.readout.project_features)(self.readout.make_features(self, x))


class LateHead(Head):
    """The head of a pipeline whose loss does the projection, chunk by chunk: x -> features."""

    def forward(self, x: Tensor, then: Callable[[Features], Any] | None = None) -> Any:
        head_features = self.readout.make_features(self, x)
        return head_features if then is None else then(head_features)


@dataclass(frozen=True)
class Layer:
    """A layer in the list: how to build it (weights unfilled), its cost (multiply-adds per token), and whether it is
    tied."""

    build: Callable[[], nn.Module]
    cost: float
    is_block: bool = False
    tied: bool = False


def list_layers(
    config: ModelConfig,
    tp: TensorParallel,
    recompute: str,
    kernels: Kernels = PLAIN,
    head: type[Head] = Head,
    cp: ContextParallel = WHOLE,
) -> list[Layer]:
    """The layers of the model in order. With `config.tied` the last one is the embedding again, used as head."""
    c, vocabulary = config, config.padded_vocab
    costs = [cost for cost, _ in layer_costs(c)]
    embedding = partial(
        Embedding, vocabulary, c.hidden, tp, "embedding", c.embedding_factor, cp, c.dropout, kernels.compile
    )
    norm_options = c.hidden, c.norm_eps, tp, "final_norm", tp.sequence, c.zero_centered_norms, kernels.compile
    return [
        Layer(embedding, cost=costs[0], tied=c.tied),
        *(
            Layer(partial(Block, c, tp, i, recompute, kernels, cp), cost=costs[1 + i], is_block=True)
            for i in range(c.layers)
        ),
        Layer(
            partial(FinalNorm, *norm_options),
            cost=costs[-2],
        ),
        Layer(embedding, cost=costs[-1], tied=True)
        if c.tied
        else Layer(
            partial(head, c.hidden, (vocabulary,), tp, "head", Readout.from_config(c)), cost=costs[-1]
        ),
    ]


class GPT(nn.Sequential):
    """All layers in one process (this tensor rank's shards).

    Children are named "0", "1", ... as DeepSpeed names the layers of a pipeline, so that checkpoints of one and
    of several stages have the same parameter names. forward(inputs) gives logits, forward(inputs, labels) the loss.
    seed: of the initial weights; None leaves them unfilled. make: builds a layer and may place it on a device.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        recompute: str,
        seed: int | None,
        loss: LossFunction | None = None,
        kernels: Kernels = PLAIN,
        cp: ContextParallel = WHOLE,
        make: Make = call,
    ) -> None:
        listed = list_layers(config, tp, recompute, kernels, cp=cp)
        super().__init__(*(make(layer.build) for layer in listed[: -1 if config.tied else None]))
        if seed is not None:
            initialise_weights(self, config, tp, seed)
        self.loss = loss
        self.tied, self.readout = config.tied, Readout.from_config(config)
        self.chunked = kernels.loss == "chunked"

    def forward(self, inputs: Stream, labels: Tensor | None = None) -> Tensor:
        x: Any = inputs
        layers = list(self.children())
        for layer in layers if self.tied else layers[:-1]:
            x = layer(x)
        loss_function = self.loss
        if labels is None:
            return self.compute_logits(x)
        assert loss_function is not None
        if self.chunked:
            return self._headed(x, lambda given: loss_function(given, labels))
        return loss_function(self.compute_logits(x), labels)

    def compute_logits(self, x: Tensor) -> Tensor:
        """What the head makes of x [s, b, hidden]."""
        return self._headed(x, self.readout.project_features)

    def _headed(self, x: Tensor, then: Callable[[Features], Tensor]) -> Tensor:
        if not self.tied:
            return self[-1](x, then)
        embedding = self[0]
        assert isinstance(embedding, VocabParallelEmbedding)
        return then(self.readout.make_features(embedding, x))


def outline_model(config: ModelConfig) -> GPT:
    """The whole model without memory for its weights, for names, shapes and placements of its parameters."""
    with torch.device("meta"):
        return GPT(config, TensorParallel(), recompute="none", seed=None)
