"""Read a Hugging Face folder, its config.json and .safetensors files, without transformers.

    model = load_folder(Path("exported"))

Nothing in it is unpickled or run. Names, shapes and dtypes are checked against config.json before any weight is
read; weights come one by one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from pydantic import ValidationError
from torch import Tensor, nn

from megastable.base.errors import CheckpointError
from megastable.base.text import visible
from megastable.checkpoint.plain import PlainModel, without_weights
from megastable.checkpoint.reader import Reader
from megastable.config.model import ModelConfig
from megastable.config.recipe import find
from megastable.config.tree import RunConfig
from megastable.parallel.sharding import place, placement_of
from megastable_tools.convert.huggingface.names import TensorRows, merge, table
from megastable_tools.convert.huggingface.settings import model_of
from megastable_tools.convert.huggingface.weight_files import INDEX, SINGLE

CONFIG, ADAPTER = "config.json", "adapter_config.json"
EDGE = 1 << 16  # bytes at either end of a file that enter the fingerprint
FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFaceFolder:
    """settings: config.json; files: the file of each tensor, by name.

    accept: keys of config.json that the user declared irrelevant. Raises CheckpointError for an invalid folder,
    an unknown architecture or option, and damaged files.
    """

    def __init__(self, path: Path, accept: Collection[str] = ()) -> None:
        self.path = find(path)
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
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise CheckpointError(f"{self.path / CONFIG}, as our model: {problem}") from None

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 of config.json and of the size and both ends of every file."""
        digest = xxhash.xxh3_128((self.path / CONFIG).read_bytes())
        for name in sorted(set(self.files.values())):
            with (self.path / name).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                digest.update(f"{name} {size}".encode() + file.read(EDGE))
                file.seek(max(0, size - EDGE))
                digest.update(file.read())
        return digest.hexdigest()

    def _find_files(self) -> dict[str, str]:
        single, index = self.path / SINGLE, self.path / INDEX
        if single.is_file():
            return dict.fromkeys(self._names(SINGLE), SINGLE)
        if not index.is_file():
            old = sorted(
                path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(pattern)
            )
            if old:
                raise CheckpointError(
                    f"{self.path} has its weights in {old[0]}, a pickle, which can hold any program: load it with "
                    "transformers where you trust it, and write it again with save_pretrained(..., "
                    "safe_serialization=True)"
                )
            raise CheckpointError(f"{self.path}: holds neither {SINGLE} nor {INDEX}")
        where = _read_json(index).get("weight_map")
        if (
            not isinstance(where, dict)
            or not where
            or not all(isinstance(file, str) for file in where.values())
        ):
            raise CheckpointError(f"{index}: its weight_map does not name a file for each tensor")
        held: dict[str, set[str]] = {}
        for file in sorted(set(where.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index}: {file!r} is not the name of a .safetensors file beside it")
            if not (self.path / file).is_file():
                raise CheckpointError(f"{self.path / file} is not there, which {INDEX} names")
            held[file] = set(self._names(file))
        for name, file in where.items():
            if name not in held[file]:
                raise CheckpointError(f"{self.path / file}: does not hold {name!r}, which {INDEX} says")
        for file, names in held.items():
            if beyond := sorted(name for name in names if where.get(name) != file):
                raise CheckpointError(
                    f"{self.path / file}: holds {beyond[0]!r}, which {INDEX} does not list there"
                )
        return dict(where)

    def _names(self, file: str) -> list[str]:
        return list(self._opened(file).entries)

    def _opened(self, file: str) -> Reader:
        if file not in self._open:
            self._open[file] = Reader(self.path / file)
        return self._open[file]

    @cached_property
    def parts(self) -> dict[str, tuple[TensorRows, ...]]:
        """Our tensors and their parts in this folder; checked against its contents. Raises CheckpointError."""
        if self.config.layers > len(self.files):  # no table of a billion names
            raise CheckpointError(
                f"{self.path}: holds too few tensors for the {self.config.layers} layers of {CONFIG}"
            )
        found = table(self.config)
        wanted = {part.name: part for parts in found.values() for part in parts}
        there = {
            name for name in self.files if not name.endswith(".rotary_emb.inv_freq")
        }  # in old Llamas: can be computed
        if self.config.tied and "lm_head.weight" in there:
            there.remove("lm_head.weight")
            if not torch.equal(self.tensor("lm_head.weight"), self.tensor("model.embed_tokens.weight")):
                raise CheckpointError(
                    f"{self.path}: tie_word_embeddings is true, and lm_head.weight is not the embedding: correct one"
                )
        for names, what in ((set(wanted) - there, "is missing"), (there - set(wanted), "is not known")):
            if names:
                more = f", and {len(names) - 1} more" if len(names) > 1 else ""
                raise CheckpointError(
                    f"{self.path}: the tensor {visible(sorted(names)[0])!r} {what}{more}: it is not what {CONFIG} says "
                    f"({self.settings['architectures'][0]}, {self.config.layers} layers, tied: {self.config.tied})"
                )
        for name, part in wanted.items():
            shape = self.shape(name)
            if shape != part.shape:
                raise CheckpointError(
                    f"{self.path}: {name} is {shape}, by {CONFIG} it should be {part.shape}"
                )
            self.dtype(name)
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        return self._opened(self.files[name]).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Raises CheckpointError for anything but a plain float."""
        held = self._opened(self.files[name])
        kind = held.entries[name].kind
        if kind not in FLOATS:
            raise CheckpointError(
                f"{self.path}: {name} is {visible(kind, 20)}: only weights in fp32, bf16, fp16 and fp64 are read"
            )
        return held.dtype(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in its own dtype; read on request. Raises CheckpointError."""
        return self._opened(self.files[name]).tensor(name)

    def ours(self, name: str, rows: int | None = None) -> Tensor:
        """One of our tensors, whole, fp32; its first dimension padded with zeros to `rows`."""
        parts = self.parts[name]
        total = sum(part.shape[0] for part in parts)
        return merge({part.name: self.tensor(part.name) for part in parts}, parts, rows or total)

    @property
    def numel(self) -> int:
        return sum(torch.Size(part.shape).numel() for parts in self.parts.values() for part in parts)


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
        dtype = folder.dtype(folder.parts["embedding.weight"][0].name)
    gpt = without_weights(folder.config, torch.device(device))
    for module, key, parameter in parameters_in(gpt):
        placement = placement_of(parameter)
        try:
            filled = nn.Parameter(folder.ours(placement.name).to(device, dtype))
        except torch.OutOfMemoryError as error:
            raise CheckpointError(
                f"{path}: its weights do not fit on {device}: {_first_line(error)}"
            ) from None
        place(filled, placement, 1)
        setattr(module, key, filled)
    run = RunConfig(model=folder.config)
    return PlainModel(gpt, run, folder.path, step=0, fingerprint=folder.fingerprint).eval()


def parameters_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter with its module, and its name there."""
    for owner in module.modules():
        for key, parameter in list(owner.named_parameters(recurse=False)):
            yield owner, key, parameter


def is_folder(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder rather than a checkpoint or a run of ours."""
    return (find(path) / CONFIG).is_file()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: transformers cannot load {path.parent}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a mapping, found a {type(content).__name__}")
    return content


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
