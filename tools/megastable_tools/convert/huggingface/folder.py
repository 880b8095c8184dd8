"""Read a Hugging Face folder, its config.json and .safetensors files, without transformers.

    model = load_folder(Path("exported"))

Nothing in it is unpickled or run. Names, shapes and dtypes are checked against config.json before any weight is
read; weights come one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError
from torch import Tensor, nn

from megastable.base.errors import CheckpointError, ConfigError
from megastable.base.text import make_visible
from megastable.checkpoint.files import Reader
from megastable.checkpoint.plain import PlainModel, set_biases, without_weights
from megastable.config.model import ModelConfig
from megastable.config.recipe import find_recipe
from megastable.config.tree import RunConfig
from megastable.parallel.sharding import placement_of, set_placement
from megastable_tools.convert.huggingface.architectures import (
    TensorRows,
    map_biases,
    map_tensor_names,
    merge_tensors,
)
from megastable_tools.convert.huggingface.settings import model_of

CONFIG, ADAPTER = "config.json", "adapter_config.json"
EDGE = 1 << 16  # bytes at either end of a file that enter the fingerprint
FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFaceFolder:
    """settings: config.json; files: the file of each tensor, by name.

    accept: keys of config.json that the user declared irrelevant. Raises CheckpointError for an invalid folder,
    an unknown architecture or option, and damaged files.
    """

    def __init__(self, path: Path, accept: Collection[str] = ()) -> None:
        self.path = find_recipe(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{path} is not there, or no folder: give one that holds {CONFIG} and weights"
            )
        if (self.path / ADAPTER).exists():
            raise CheckpointError(
                f"{self.path / ADAPTER}: weights of an adapter are not read here: merge them into the model first"
            )
        self.settings = _read_json(self.path / CONFIG)
        self.sizes = model_of(self.settings, str(self.path / CONFIG), accept)
        self._open: dict[str, Reader] = {}
        self.files = self._find_files()

    @cached_property
    def config(self) -> ModelConfig:
        """Our configuration of the model, without padding of the vocabulary."""
        try:
            return ModelConfig(**self.sizes, vocab_multiple=1)
        except ValidationError as error:
            model_problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise CheckpointError(f"{self.path / CONFIG}, as our model: {model_problem}") from None

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 of config.json and of the size and both ends of every file."""
        fingerprint_digest = xxhash.xxh3_128((self.path / CONFIG).read_bytes())
        for file_name in sorted(set(self.files.values())):
            with (self.path / file_name).open("rb") as weight_file:
                file_size = weight_file.seek(0, 2)
                weight_file.seek(0)
                fingerprint_digest.update(f"{file_name} {file_size}".encode() + weight_file.read(EDGE))
                weight_file.seek(max(0, file_size - EDGE))
                fingerprint_digest.update(weight_file.read())
        return fingerprint_digest.hexdigest()

    def _find_files(self) -> dict[str, str]:
        single_path, index = self.path / SINGLE, self.path / INDEX
        if single_path.is_file():
            return dict.fromkeys(self._opened(SINGLE).entries, SINGLE)
        if not index.is_file():
            if old := sorted(p.name for p in self.path.glob("*") if p.suffix in (".bin", ".pt", ".pth")):
                raise CheckpointError(
                    f"{self.path} has its weights in {old[0]}, a pickle, which can hold any program: load it with "
                    "transformers where you trust it, and write it again with save_pretrained(..., "
                    "safe_serialization=True)"
                )
            raise CheckpointError(f"{self.path}: holds neither {SINGLE} nor {INDEX}")
        weight_map = _read_json(index).get("weight_map") or {}
        is_mapping = isinstance(weight_map, dict) and weight_map
        if not is_mapping or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: its weight_map does not name a file for each tensor")
        names_by_file: dict[str, set[str]] = {}
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index}: {file!r} is not the name of a .safetensors file beside it")
            if not (self.path / file).is_file():
                raise CheckpointError(f"{self.path / file} is not there, which {INDEX} names")
            names_by_file[file] = set(self._opened(file).entries)
        for name, file in weight_map.items():
            if name not in names_by_file[file]:
                raise CheckpointError(f"{self.path / file}: does not hold {name!r}, which {INDEX} says")
        for file, held_names in names_by_file.items():
            if unlisted_names := sorted(
                held_name for held_name in held_names if weight_map.get(held_name) != file
            ):
                raise CheckpointError(
                    f"{self.path / file}: holds {unlisted_names[0]!r}, which {INDEX} does not list there"
                )
        return dict(weight_map)

    def _opened(self, file: str) -> Reader:
        if file not in self._open:
            self._open[file] = Reader(self.path / file)
        return self._open[file]

    @cached_property
    def parts(self) -> dict[str, tuple[TensorRows, ...]]:
        """Our tensors and their parts in this folder; checked against its contents. Raises CheckpointError."""
        experts = self.config.experts.count if self.config.experts is not None else 0
        if max(self.config.layers, experts) > len(self.files):  # no table of a billion names
            of_experts = f" and {experts} experts" if experts else ""
            raise CheckpointError(
                f"{self.path}: holds too few tensors for the {self.config.layers} layers{of_experts} of {CONFIG}"
            )
        our_rows = map_tensor_names(self.config)
        wanted = {row_part.name: row_part for parts in our_rows.values() for row_part in parts}
        wanted |= {row_part.name: row_part for row_part in map_biases(self.config).values()}
        # In old Llamas, and can be computed.
        there = {name for name in self.files if not name.endswith(".rotary_emb.inv_freq")}
        if self.config.tied and "lm_head.weight" in there:
            there.remove("lm_head.weight")
            embedding_rows = self.read_tensor("model.embed_tokens.weight")
            if not torch.equal(self.read_tensor("lm_head.weight"), embedding_rows):
                raise CheckpointError(
                    f"{self.path}: tie_word_embeddings is true, and lm_head.weight is not the embedding: correct one"
                )
        for names, what in ((set(wanted) - there, "is missing"), (there - set(wanted), "is not known")):
            if names:
                more = f", and {len(names) - 1} more" if len(names) > 1 else ""
                raise CheckpointError(
                    f"{self.path}: the tensor {make_visible(sorted(names)[0])!r} {what}{more}: it is not what {CONFIG} "
                    f"says ({self.settings['architectures'][0]}, {self.config.layers} layers, tied: {self.config.tied})"
                )
        for tensor_name, row_part in wanted.items():
            tensor_shape = self.shape_of(tensor_name)
            if tensor_shape != row_part.shape:
                raise CheckpointError(
                    f"{self.path}: {tensor_name} is {tensor_shape}, by {CONFIG} it should be {row_part.shape}"
                )
            self.dtype_of(tensor_name)
        return our_rows

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._opened(self.files[name]).shape_of(name)

    def dtype_of(self, name: str) -> torch.dtype:
        """Raises CheckpointError for anything but a plain float."""
        weight_reader = self._opened(self.files[name])
        kind = weight_reader.entries[name].kind
        if kind not in FLOATS:
            raise CheckpointError(
                f"{self.path}: {name} is {make_visible(kind, 20)}: only weights in fp32, bf16, fp16 and fp64 are read"
            )
        return weight_reader.dtype_of(name)

    def read_tensor(self, name: str) -> Tensor:
        """A tensor in its own dtype; read on request. Raises CheckpointError."""
        return self._opened(self.files[name]).read_tensor(name)

    def read_our_tensor(self, name: str, rows: int | None = None) -> Tensor:
        """One of our tensors, whole, fp32; its first dimension padded with zeros to `rows`."""
        row_parts = self.parts[name]
        row_total = sum(part.shape[0] for part in row_parts)
        their_tensors = {part.name: self.read_tensor(part.name) for part in row_parts}
        return merge_tensors(their_tensors, row_parts, rows or row_total)

    @property
    def biases(self) -> Tensor | None:
        """The bias of the choice of experts, fp32 [layers, experts], 0 in layers without; None if it is all 0 or the
        architecture has none."""
        named_biases = map_biases(self.config)
        if not named_biases:
            return None
        assert self.config.experts is not None
        biases = torch.zeros(self.config.layers, self.config.experts.count)
        for block, row_part in named_biases.items():
            biases[block] = self.read_tensor(row_part.name)
        return biases if biases.any() else None

    @property
    def numel(self) -> int:
        return sum(torch.Size(row_part.shape).numel() for parts in self.parts.values() for row_part in parts)


def load_folder(
    path: Path,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
    accept: Collection[str] = (),
) -> PlainModel:
    """The model in a Hugging Face folder, as `load_plain` returns that of a checkpoint; its run has defaults for
    everything but the model.

    dtype None: that of the embedding in the file. Memory: the weights once, and one tensor in fp32. Raises
    CheckpointError.
    """
    folder = HuggingFaceFolder(path, accept)
    if dtype is None:
        dtype = folder.dtype_of(folder.parts["embedding.weight"][0].name)
    empty_model = without_weights(folder.config, torch.device(device))
    set_biases(empty_model, folder.biases, torch.device(device))
    for owner_module, parameter_key, model_parameter in parameters_in(empty_model):
        parameter_placement = placement_of(model_parameter)
        our_tensor = folder.read_our_tensor(parameter_placement.name)
        try:
            filled_parameter = nn.Parameter(our_tensor.to(device, dtype))
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"{path}: its weights do not fit on {device}: {_first_line(error)}"
            ) from None
        set_placement(filled_parameter, parameter_placement, 1)
        setattr(owner_module, parameter_key, filled_parameter)
    run = RunConfig(model=folder.config)
    return PlainModel(empty_model, run, folder.path, step=0, fingerprint=folder.fingerprint).eval()


def parameters_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter with its module, and its name there."""
    for owner_module in module.modules():
        for parameter_key, model_parameter in list(owner_module.named_parameters(recurse=False)):
            yield owner_module, parameter_key, model_parameter


def is_folder(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder rather than a checkpoint or a run of ours."""
    return (find_recipe(path) / CONFIG).is_file()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        json_content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: transformers cannot load {path.parent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from None
    if not isinstance(json_content, dict):
        raise CheckpointError(f"{path}: expected a mapping, found a {type(json_content).__name__}")
    return json_content


def _first_line(error: Exception) -> str:
    error_lines = str(error).strip().splitlines()
    return error_lines[0] if error_lines else type(error).__name__


# Tensors over .safetensors files, with the index of where each one is


Entry = tuple[str, torch.dtype, tuple[int, ...]]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def bytes_of(entry: Entry) -> int:
    _, tensor_dtype, tensor_shape = entry
    return tensor_dtype.itemsize * torch.Size(tensor_shape).numel()


def read_size(text: str) -> int:
    """Bytes of a text such as 5GB or 500 MiB. Raises ConfigError."""
    size_match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?)?B?", text.strip(), re.IGNORECASE)
    size_bytes = float(size_match[1]) * UNITS[(size_match[2] or "").upper()] if size_match else 0
    if not 1 <= size_bytes < 2**62:
        raise ConfigError(f"--shard-size {text}: write a size such as 5GB or 500MB")
    return int(size_bytes)


def plan_weight_files(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """File names and their tensors, in order. A file exceeds `limit` bytes only if a single tensor does."""
    shards: list[list[Entry]] = [[]]
    file_size = 0
    for tensor_entry in entries:
        if shards[-1] and file_size + bytes_of(tensor_entry) > limit:
            shards.append([])
            file_size = 0
        shards[-1].append(tensor_entry)
        file_size += bytes_of(tensor_entry)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": held for i, held in enumerate(shards, start=1)}


def write_weight_index(planned: dict[str, list[Entry]]) -> str:
    """model.safetensors.index.json."""
    all_entries = [tensor_entry for held in planned.values() for tensor_entry in held]
    size_totals = {
        "total_parameters": sum(torch.Size(tensor_shape).numel() for _, _, tensor_shape in all_entries),
        "total_size": sum(map(bytes_of, all_entries)),
    }
    where = {tensor_name: file_name for file_name, held in planned.items() for tensor_name, _, _ in held}
    return json.dumps({"metadata": size_totals, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
