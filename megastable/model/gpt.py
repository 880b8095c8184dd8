"""The GPT as a list of layers (embedding, blocks, final norm, head), used for one pipeline stage or many.

Blocks of attention and SwiGLU, each with an RMSNorm before it (pre-LN) or after it (OLMo 2); no biases, except
those of q, k and v with `qkv_bias`. Layers pass on x [s, b, hidden] (its sequence shard under sequence parallelism), or
(x, segments) if attention is restricted to documents. Segments cover whole sequences, also where context parallelism
gives a rank only a part of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config.tree import ModelConfig
from megastable.model.attention import Attention, Places
from megastable.model.init import initialise
from megastable.model.kernels import PLAIN, Kernels
from megastable.model.loss import Features, LossFunction, project
from megastable.model.mlp import MLP, swiglu
from megastable.model.norm import RMSNorm
from megastable.model.sizes import layer_costs
from megastable.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megastable.parallel.mappings import enter
from megastable.parallel.topology import WHOLE, ContextParallel, TensorParallel

Stream = Tensor | tuple[Tensor, Tensor]  # x, or (x, segments)
Make = Callable[[Callable[[], nn.Module]], nn.Module]


def _open(stream: Stream) -> tuple[Tensor, Tensor | None]:
    return stream if isinstance(stream, tuple) else (stream, None)


def _close(x: Tensor, segments: Tensor | None) -> Stream:
    return x if segments is None else (x, segments)


class Embedding(VocabParallelEmbedding):
    """Tokens [b, s], or (tokens, segments) -> x [s, b, hidden]."""

    def forward(self, inputs: Stream) -> Stream:  # type: ignore[override]
        tokens, segments = _open(inputs)
        return _close(super().forward(tokens), segments)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `norms` "after" x + norm(attention(x)), x + norm(mlp(x)).

    The latter is the reordered norm of OLMo 2 (arXiv:2501.00656 section 3), as in Swin v2 (arXiv:2111.09883): it norms
    what is added to the residual stream, not the stream. Both call the norms `attention_norm` and `mlp_norm`.
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
        core = recompute == "selective"
        self.recompute = recompute == "full"
        self.norms_after = config.norms == "after"
        self.attention_norm = RMSNorm(
            config.hidden, config.norm_eps, tp, f"{name}.attention_norm", tp.sequence
        )
        self.attention = Attention(config, tp, f"{name}.attention", core, kernels, cp)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps, tp, f"{name}.mlp_norm", tp.sequence)
        self.mlp = MLP(config, tp, f"{name}.mlp", core)
        self._split = (tp.size if tp.sequence else 1) * cp.size
        self.in_halves = False  # for hooks on its modules; see `_halves`
        self._fast, self._kernels = self._block, kernels
        if kernels.compile:
            # All blocks share one code object: it is compiled once for training and once for evaluation.
            self._fast = torch.compile(self._block, fullgraph=kernels.whole_blocks, dynamic=False)

    def in_pieces(self) -> None:
        """Exclude its linear layers from torch.compile; the code between them is compiled separately."""
        if not self._kernels.compile:
            return
        whole = self._kernels.whole_blocks
        between = torch.compile(self.attention.between, fullgraph=whole, dynamic=False)
        self._fast = lambda x, at: self.around(x, lambda y: self.attention(y, at, between))
        if isinstance(self.mlp, MLP):
            self.mlp.activation = torch.compile(swiglu, fullgraph=whole, dynamic=False)

    def forward(self, stream: Stream) -> Stream:
        x, segments = _open(stream)
        at = self._places(x, segments)
        run = self._halves if self.in_halves else self._fast
        again = (self.recompute or self.in_halves) and torch.is_grad_enabled()
        return _close(_recomputed(run, x, at) if again else run(x, at), segments)

    @torch.no_grad()
    def queries_and_keys(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """q [b, q, s, d] and k [b, k, s, d] at the attention core for `stream`. Computed separately from
        `forward`, which is unchanged. Collective over the tensor and the context group."""
        x, segments = _open(stream)
        at = self._places(x, segments)
        q, k, _ = self.attention.rotated(
            self.attention.qkv(x if self.norms_after else self.attention_norm(x)), at
        )
        return q, k

    def _places(self, x: Tensor, segments: Tensor | None) -> Places:
        return self.attention.places(x.shape[0] * self._split, segments, x.device)

    def _block(self, x: Tensor, at: Places) -> Tensor:
        return self.around(x, lambda y: self.attention(y, at))

    def _halves(self, x: Tensor, at: Places) -> Tensor:
        """The block, not compiled, so that hooks on its modules run. As that saves twice the activations, it is
        recomputed in the backward pass, one half after the other."""
        return _recomputed(self._fed, _recomputed(self._attended, x, lambda y: self.attention(y, at)))

    def around(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The block with `attend` in place of its attention; `attend` maps x [s, b, hidden] to the same shape."""
        return self._fed(self._attended(x, attend))

    def _attended(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        norm = self.attention_norm
        return x + (norm(attend(x)) if self.norms_after else attend(norm(x)))

    def _fed(self, x: Tensor) -> Tensor:
        norm = self.mlp_norm
        return x + (norm(self.mlp(x)) if self.norms_after else self.mlp(norm(x)))


def _recomputed(run: Callable[..., Tensor], *args: Any) -> Tensor:
    # No dropout anywhere: there is no random state to save and restore.
    y: Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    return y


class FinalNorm(RMSNorm):
    """The last norm; later layers need no segments."""

    def forward(self, stream: Stream) -> Tensor:
        return super().forward(_open(stream)[0])


class Head(ColumnParallelLinear):
    """x [s, b, hidden] -> logits [s, b, padded vocabulary / tensor], or the result of `then` on the features."""

    def forward(self, x: Tensor, then: Callable[[Features], Any] = project) -> Any:
        # Called in here, because ZeRO 3 releases the weight afterwards.
        return then(features(self, x))


class LateHead(Head):
    """The head of a pipeline whose loss does the projection, chunk by chunk: x -> features."""

    def forward(self, x: Tensor, then: Callable[[Features], Any] = lambda given: given) -> Any:
        return then(features(self, x))


def features(head: ColumnParallelLinear | VocabParallelEmbedding, x: Tensor) -> Features:
    """Inputs of the logits, for a head or the embedding of a tied model: x inside the tensor-parallel region, and the
    weight (a view: DeepSpeed's pipeline starts a backward pass by hooks on non-leaf tensors)."""
    return enter(x, head.tp), head.weight.view_as(head.weight)


def tied_head(embedding: VocabParallelEmbedding, x: Tensor) -> Tensor:
    """The head of a tied model: logits from the embedding's weight."""
    return project(features(embedding, x))


@dataclass(frozen=True)
class Layer:
    """A layer in the list: how to build it (weights unfilled), its cost (multiply-adds per token), and whether it is
    tied."""

    build: Callable[[], nn.Module]
    cost: float
    is_block: bool = False
    tied: bool = False


def layers(
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
    embedding = partial(Embedding, vocabulary, c.hidden, tp, "embedding")
    return [
        Layer(embedding, cost=costs[0], tied=c.tied),
        *(
            Layer(partial(Block, c, tp, i, recompute, kernels, cp), cost=costs[1 + i], is_block=True)
            for i in range(c.layers)
        ),
        Layer(partial(FinalNorm, c.hidden, c.norm_eps, tp, "final_norm", tp.sequence), cost=costs[-2]),
        Layer(embedding, cost=costs[-1], tied=True)
        if c.tied
        else Layer(partial(head, c.hidden, (vocabulary,), tp, "head"), cost=costs[-1]),
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
        listed = layers(config, tp, recompute, kernels, cp=cp)
        super().__init__(*(make(layer.build) for layer in listed[: -1 if config.tied else None]))
        if seed is not None:
            initialise(self, config, tp, seed)
        self.loss = loss
        self.tied = config.tied
        self.chunked = kernels.loss == "chunked"

    def forward(self, inputs: Stream, labels: Tensor | None = None) -> Tensor:
        x: Any = inputs
        modules = list(self.children())
        for module in modules if self.tied else modules[:-1]:
            x = module(x)
        loss = self.loss
        if labels is None:
            return self._headed(x, project)
        assert loss is not None
        if self.chunked:
            return self._headed(x, lambda given: loss(given, labels))
        return loss(self._headed(x, project), labels)

    def _headed(self, x: Tensor, then: Callable[[Features], Tensor]) -> Tensor:
        head = self[-1]
        return then(features(self._embedding, x)) if self.tied else head(x, then)

    @property
    def _embedding(self) -> VocabParallelEmbedding:
        embedding = self[0]
        assert isinstance(embedding, VocabParallelEmbedding)
        return embedding
