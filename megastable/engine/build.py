"""Build a model, or this rank's stage of it, for DeepSpeed's engines: on its device, cut into stages, partitioned."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from megastable.base.collectives import run_on_all
from megastable.base.errors import ConfigError
from megastable.base.free_memory import GIB, total_bytes
from megastable.base.products import linear, linear_of_parameter
from megastable.config.tree import RunConfig
from megastable.engine.patches import Partitioned
from megastable.model import gpt
from megastable.model.init import initialise_weights
from megastable.model.kernels import DTYPES, Kernels
from megastable.model.loss import LossFunction
from megastable.model.sizes import matrix_elements
from megastable.parallel.deferred_gradients import multiply_deferring
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.layout import Layout, cut_into_stages, list_chunks
from megastable.parallel.topology import ContextParallel, Topology


def build_model(
    config: RunConfig, ds_config: dict[str, Any], topology: Topology, kernels: Kernels, loss: LossFunction,
    cp: ContextParallel, device: torch.device,
) -> nn.Module:  # fmt: skip
    """The model, or this rank's stage, with initial weights; under ZeRO 3 this rank's partition of them. ConfigError if
    they cannot fit into memory."""
    run_on_all(partial(check_weights_fit, config, topology.layout, device))
    make = partial(_make, config, ds_config, topology, device)
    module: nn.Module
    if topology.layout.pipeline == 1:
        module = gpt.GPT(config.model, loss.tp, config.parallel.recompute, None, loss, kernels, cp, make)
    else:
        module = Pipeline(config, kernels, topology, loss, cp, make)
    initialise_weights(module, config.model, loss.tp, config.run.seed, topology.data_rank)
    return module


def check_weights_fit(config: RunConfig, layout: Layout, device: torch.device) -> None:
    """ConfigError if a rank's even share of the weights alone is more than the memory of its device: before torch fails
    at one of them with a traceback, or the host begins to end processes."""
    sharing_ranks = layout.world if config.parallel.zero == 3 else layout.tensor * layout.pipeline
    rank_elements = matrix_elements(config.model, layout.expert)
    needed_bytes = rank_elements * DTYPES[config.precision.kind].itemsize // sharing_ranks
    on_gpu = device.type == "cuda"
    device_memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else total_bytes()
    if needed_bytes > device_memory:
        m = config.model
        raise ConfigError(
            f"the weights of this model take {needed_bytes / GIB:.3g} GiB a rank, and "
            f"{'a GPU' if on_gpu else 'this host'} has {device_memory / GIB:.3g} GiB: lower model.layers={m.layers}, "
            f"model.hidden={m.hidden}, model.head_dim={m.head_width}, model.ffn={m.ffn_width}, "
            f"model.vocab_size={m.vocab_size} or model.vocab_multiple={m.vocab_multiple}, or share the model out over "
            "more ranks by parallel.tensor, parallel.pipeline or parallel.zero=3, and experts by parallel.expert"
        )


def _make(
    config: RunConfig, ds_config: dict[str, Any], topology: Topology, device: torch.device,
    layer: Callable[[], nn.Module],
) -> nn.Module:  # fmt: skip
    """An unfilled layer on its device and in its dtype: `deepspeed.initialize` would hold it twice to convert it, and
    whole to partition it."""
    dtype_before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[config.precision.kind])
    try:
        with device:
            built_layer = layer()
    finally:
        torch.set_default_dtype(dtype_before)
    if config.parallel.schedule == "zero_bubble":
        defer_weight_gradients(built_layer)
    if config.parallel.zero == 3:
        for linear_part in built_layer.modules():
            if isinstance(linear_part, ColumnParallelLinear | RowParallelLinear) and (
                linear_part.product is linear  # others save the Parameter anyway
            ):
                linear_part.product = linear_of_parameter
        # Otherwise DeepSpeed monkeypatches F.linear globally.
        zero_section = ds_config["zero_optimization"] | {"memory_efficient_linear": False}
        given_config = ds_config | {"zero_optimization": zero_section}
        with turn_refusals_into_config_errors(config.deepspeed):
            Partitioned(built_layer, topology.data_group, config_dict_or_path=given_config, mpu=Mpu(topology))
    return built_layer


def defer_weight_gradients(layer: nn.Module) -> None:
    """Let the products of a block leave their weight gradients for later, as those of overlapped.py do by themselves.
    They are not compiled then."""
    if isinstance(layer, gpt.Block):
        for part in layer.modules():
            if isinstance(part, ColumnParallelLinear | RowParallelLinear) and part.product is linear:
                part.product = multiply_deferring
        layer.compile_in_pieces()


@contextlib.contextmanager
def turn_refusals_into_config_errors(file: str) -> Iterator[None]:
    """Turn DeepSpeed's refusals into a ConfigError. file: the DeepSpeed JSON that the recipe names."""
    try:
        yield
    except (AssertionError, ValueError, KeyError, DeepSpeedConfigError) as refusal_error:
        raise ConfigError(
            f"deepspeed={file}: DeepSpeed refuses this configuration: {refusal_error}. Compare the file with those in "
            "ds_configs/, and look at `python -m megastable.config RECIPE`"
        ) from refusal_error


class Mpu:
    """The model-parallel unit that DeepSpeed requires if there is one pipeline stage."""

    def __init__(self, topology: Topology) -> None:
        self.t = topology

    def get_model_parallel_group(self) -> Any:
        return self.t.tensor_group

    def get_model_parallel_rank(self) -> int:
        return self.t.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self.t.layout.tensor

    get_tensor_model_parallel_group = get_slice_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_slice_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> Any:
        return self.t.data_group

    def get_data_parallel_world_size(self) -> int:
        return self.t.layout.data


class _Spec(LayerSpec):
    def __init__(self, layer: gpt.Layer, make: gpt.Make) -> None:
        super().__init__(nn.Module)
        self.layer, self.make = layer, make

    def build(self, log: bool = False) -> nn.Module:
        return self.make(self.layer.build)


class _TiedSpec(TiedLayerSpec):
    build = _Spec.build

    def __init__(self, layer: gpt.Layer, make: gpt.Make, forward: Callable[..., Any] | None) -> None:
        super().__init__("embedding", nn.Module, forward_fn=forward)
        self.layer, self.make = layer, make


class _Chunk(nn.Module):
    """Neighbouring layers of a stage."""

    def __init__(self, layers: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__()
        self._functions = layers
        self._modules_of = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))

    def forward(self, stream: Any) -> Any:
        for layer in self._functions:
            stream = layer(stream)
        return stream


class Pipeline(PipelineModule):
    """A PipelineModule of one chunk of layers, or several, by `layout.cut_into_stages`.

    chunks: of this stage; not registered, so that names of parameters are those of their layers. present: the number of
    the one that `forward` calls, between steps the last.
    """

    def __init__(
        self,
        config: RunConfig,
        kernels: Kernels,
        topology: Topology,
        loss: LossFunction,
        cp: ContextParallel,
        make: gpt.Make,
    ) -> None:
        is_chunked, recompute = kernels.loss == "chunked", config.parallel.recompute
        head_class = gpt.LateHead if is_chunked else gpt.Head
        readout = gpt.Readout.from_config(config.model)
        tied_forward = readout.make_features if is_chunked else readout.tied_head
        self.chunks: list[_Chunk] = []
        self.present = config.parallel.model_chunks - 1
        self._layers = gpt.list_layers(config.model, loss.tp, recompute, kernels, head_class, cp)
        layer_specs: list[LayerSpec] = []
        for layer_index, layer in enumerate(self._layers):
            if layer.tied:
                layer_specs.append(_TiedSpec(layer, make, tied_forward if layer_index else None))
            else:
                layer_specs.append(_Spec(layer, make))
        layout = topology.layout
        rank_grid = PipeModelDataParallelTopology(
            num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data
        )
        super().__init__(layer_specs, topology=rank_grid, loss_fn=loss)

    def _partition_layers(self, method: str = "") -> None:
        costs, is_block = [layer.cost for layer in self._layers], [layer.is_block for layer in self._layers]
        self.parts = cut_into_stages(costs, self.num_stages * (self.present + 1), is_block)
        self._ranges = list_chunks(self.parts, self.num_stages, self.stage_id)

    def _build(self) -> None:
        for layer_range in self._ranges:
            first_number = len(self.forward_funcs)
            self._set_bounds(layer_range.start, layer_range.stop)
            super()._build()
            self.chunks.append(_Chunk(self.forward_funcs[first_number:]))

    def stage_owner(self, layer_idx: int) -> int:
        """The stage of a layer."""
        return (bisect_right(self.parts, layer_idx) - 1) % self.num_stages

    def forward(self, forward_input: gpt.Stream) -> Any:
        """Of the present chunk."""
        return self.chunks[self.present](forward_input)
