"""Read torch.save files from other programs: tensors and plain data, without running any code in them.

    content = load(Path("global_step100/mp_rank_00_model_states.pt"))

Such files hold objects of their framework (a loss scaler, an enum, argparse's Namespace). They are read by torch's
`weights_only` unpickler, which imports nothing and calls only what makes tensors; every other class or function in
the pickle becomes a `StandIn`, which stores its arguments and does nothing.
"""

from __future__ import annotations

import _compat_pickle
import math
import pickle
import pickletools
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.text import make_visible

BLOCK = 1 << 24  # bytes
# Pickles before the tensors in files of torch before 1.6: magic number, protocol, system, content.
LEGACY_PICKLES = 4


class StandIn:
    """Replaces an object whose class must not run. path: full name of the class; args, state: from its pickle."""

    path = ""

    def __new__(cls, *args: Any) -> StandIn:
        stand_in = super().__new__(cls)
        stand_in.args, stand_in.state = args, None
        return stand_in

    def __init__(self, *args: Any) -> None:
        self.args: tuple[Any, ...] = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{make_visible(self.path, 80)}>"


def read_fields(value: Any) -> dict[str, Any]:
    """The attributes of a pickled object, or a mapping itself; empty for anything else."""
    state = value.state if isinstance(value, StandIn) else value
    return {key: v for key, v in state.items() if isinstance(key, str)} if isinstance(state, dict) else {}


def read_dense_tensor(value: Any) -> Tensor | None:
    """A contiguous floating-point tensor; None for anything else."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return None
    return value.detach() if value.is_floating_point() else None


def parse_number(value: Any) -> float | None:
    """A finite number: plain, as a tensor of one element, or as an enum's member; None for anything else."""
    if isinstance(value, StandIn) and len(value.args) == 1:
        value = value.args[0]
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def read_member_name(value: Any) -> str | None:
    """The name of an enum's member as Python 3.11.0 to 3.11.3 pickle it: by its name; None for anything else."""
    is_attribute = isinstance(value, StandIn) and value.path == "builtins.getattr" and len(value.args) == 2
    return value.args[1] if is_attribute and isinstance(value.args[1], str) else None


def load_pickle(path: Path) -> Any:
    """The content that `torch.save` wrote to `path`; tensors on the CPU, mapped if the format allows it, not read.

    Every zip entry's CRC-32 is checked first (torch itself ignores them); files of torch before 1.6 have none. Raises
    CheckpointError for anything that cannot be read.
    """
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
            file.seek(0)
            if is_zip:
                imported_names = _in_zip(path, file)
            else:
                imported_names = {name for _ in range(LEGACY_PICKLES) for name in _wanted(file)}
        with _only(imported_names), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch, zipfile and pickletools raise nearly anything for an invalid file
        raise CheckpointError(
            f"{path}: not a file of tensors that can be read safely ({_why(error)}): it is damaged, truncated, or "
            "holds executable content; get it again from its source, or save only tensors in it"
        ) from None


def _why(error: Exception) -> str:
    """The informative line of an error. Torch wraps it in advice to run whatever is in the file."""
    inner_error = error.__context__ if isinstance(error, pickle.UnpicklingError) else None
    error_lines = str(inner_error or error).strip().splitlines()
    return make_visible(error_lines[0], 200) if error_lines else type(error).__name__


def _in_zip(path: Path, file: IO[bytes]) -> set[str]:
    """Names that the pickle in a zip imports; every entry has been checked against its CRC-32."""
    with zipfile.ZipFile(file) as zip_archive:
        pickle_entries = []
        for entry_info in zip_archive.infolist():
            if entry_info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{path}: holds compressed entries, which torch.save never writes")
            if entry_info.filename.endswith("/data.pkl"):
                pickle_entries.append(entry_info)
            if entry_info.CRC:  # 0: torch was told not to compute them
                with zip_archive.open(entry_info) as zip_entry:
                    while zip_entry.read(BLOCK):
                        pass
        if len(pickle_entries) != 1:
            raise CheckpointError(f"{path}: a zip, but not one of torch.save: it has no data.pkl")
        with zip_archive.open(pickle_entries[0]) as zip_entry:
            return set(_wanted(zip_entry))


def _wanted(pickled: IO[bytes]) -> Iterator[str]:
    """Full names of classes and functions in the next pickle of a stream, by today's Python names."""
    for opcode, opcode_argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            module_name, _, name = str(opcode_argument).partition(" ")
            module_name, name = _compat_pickle.NAME_MAPPING.get((module_name, name), (module_name, name))
            yield f"{_compat_pickle.IMPORT_MAPPING.get(module_name, module_name)}.{name}"


# Containers of the standard library that are data: mapped to plain ones that the unpickler can fill.
_PLAIN: dict[str, Callable[..., Any]] = {
    "collections.defaultdict": lambda *_: OrderedDict(),
    "collections.deque": lambda *_: [],
}


@contextmanager
def _only(names: set[str]) -> Iterator[None]:
    """Let the unpickler make stand-ins of `names` only; what others in this process have allowed is suspended."""
    globals_before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
            (_PLAIN.get(name) or type("StandIn", (StandIn,), {"path": name}), name) for name in names
        ]
        torch.serialization.add_safe_globals(allowed)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(globals_before)
