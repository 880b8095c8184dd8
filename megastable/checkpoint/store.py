"""The checkpoint store of a run: format, verification, and the search for the newest good checkpoint.

checkpoints/step-N/ holds every rank's part (files.py), state.json (the run state), recipe.yaml and manifest.json
(sizes and checksums of all other files, and of itself). `checkpoints/latest` is a text file with the name of the
newest one, replaced atomically. The only pickles are rng-*.pt, which are read with `weights_only=True`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError

from megastable import __version__
from megastable.base import durable
from megastable.base.errors import CheckpointError
from megastable.base.text import make_visible
from megastable.checkpoint.files import FORMAT, FileRecord, hash_file, random_name
from megastable.checkpoint.vitals import Vitals
from megastable.config.model import ModelConfig
from megastable.run import directory
from megastable_guard.random_states import restore_random_states

log = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)

MANIFEST, STATE, RECIPE, LATEST = "manifest.json", "state.json", "recipe.yaml", "latest"
HEALTH, PINNED = "health.json", "pinned.json"  # markers, see markers.py
QUARANTINED, ACCEPTED = "quarantined.json", "accepted.json"
SHARED = "shared.safetensors"  # the optimizer's state that every rank holds alike; not of every optimizer
SEAL = b'"xxh3": "%s"'  # the last field of a manifest
SAVING = ".saving-"  # prefix of a checkpoint during its save
PARTS = re.compile(r"(rank-\d+\.(json|safetensors)|rng-\d+\.pt)")  # files of the ranks


class LayoutState(BaseModel):
    """The parallel layout in which a checkpoint was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int
    pipeline: int
    data: int
    context: int = 1  # number of data-parallel ranks that share their samples
    replicas: int = 1  # groups of data-parallel ranks, over each of which ZeRO shares out the state
    expert: int = 1  # number of data-parallel ranks that share out experts
    zero: int
    precision: str

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        context_text = f" (context {self.context})" if self.context > 1 else ""
        context_text += f" (experts over {self.expert})" if self.expert > 1 else ""
        axes_text = f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}{context_text}"
        replica_text = f" in {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{axes_text}, ZeRO {self.zero}{replica_text}, {self.precision}"


class RunState(BaseModel):
    """State of a run: everything needed to continue besides weights, moments and RNG.

    step: steps done, discarded ones included. updates, trained_tokens: of the applied ones: they determine the learning
    rate. cursor: the next data position. batch, piece: of the last step: its samples, and the length of the pieces that
    its last sample is cut into, in tokens; 0 = unknown. optimizer: its name; adam_step: its own count of updates, 0
    without its state. scaler: of fp16's loss. fp8: the history of largest magnitudes for delayed scales, by layer.
    stability: the state of detector, policy and the open incident (recovery/). mix: the share of each corpus in the
    last step. vitals: of the state at this step, None without (checkpoint/new_run.py).
    """

    # A loss may be nan: the default would write null, which cannot be read back as a number.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    format: Literal[2] = FORMAT
    step: NonNegativeInt = 0
    updates: NonNegativeInt = 0
    cursor: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    trained_tokens: NonNegativeInt = 0
    batch: NonNegativeInt = 0
    piece: NonNegativeInt = 0
    seconds: float = 0.0
    discards_in_a_row: NonNegativeInt = 0
    optimizer: str = "adamw"
    adam_step: FiniteFloat = 0.0
    scaler: dict[str, bool | int | float] = {}
    fp8: dict[str, list[list[FiniteFloat]]] = {}
    first_loss: float | None = None
    recent_losses: list[float] = []
    order_fingerprint: str
    layout: LayoutState
    stability: dict[str, Any] = {}
    mix: dict[str, float] = {}
    vitals: Vitals | None = None

    @property
    def recent_loss(self) -> float | None:
        """The training loss reported for a run or checkpoint: the mean of the finite losses of its last steps (up to
        20), nats per token; None if there is none. A single step's loss depends too much on its batch."""
        return finite_mean(self.recent_losses)

    versions: dict[str, str] = {}

    def after_step(
        self, *, cursor: int, tokens: int, seconds: float, loss: float, applied: bool, mix: dict[str, float],
        batch: int, piece: int,
    ) -> RunState:  # fmt: skip
        """Where the run stands after one more step: of `tokens` tokens, in `seconds`, with a mean `loss` in nats per
        token; applied: its update was not refused; cursor: behind it; mix: of its last sample; batch:
        samples of the step; piece: length of the pieces of its last sample, in tokens."""
        return self.model_copy(update={
            "step": self.step + 1, "cursor": cursor, "tokens": self.tokens + tokens,
            "seconds": self.seconds + seconds, "updates": self.updates + applied, "mix": mix,
            "trained_tokens": self.trained_tokens + tokens * applied, "batch": batch, "piece": piece,
            "discards_in_a_row": 0 if applied else self.discards_in_a_row + 1,
            "first_loss": loss if self.first_loss is None else self.first_loss,
            "recent_losses": [*self.recent_losses, loss][-20:],
        })  # fmt: skip


class Contents(BaseModel):
    """manifest.json of a checkpoint.

    fingerprints: of the "model" and of the "data" (its order); finite: whether all weights and moments are; xxh3: of
    this text without it.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal[2] = FORMAT
    step: NonNegativeInt
    files: dict[str, FileRecord]
    fingerprints: dict[str, str] = {}
    versions: dict[str, str] = {}
    finite: bool = True
    xxh3: str = ""

    @property
    def parts(self) -> list[str]:
        """The descriptions of the ranks' parts, by rank."""
        return sorted(name for name in self.files if PARTS.fullmatch(name) and name.endswith(".json"))

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file_record.size for file_record in self.files.values())

    def to_sealed_bytes(self) -> bytes:
        """The manifest's bytes, with its own checksum."""
        unsealed_text = self.model_copy(update={"xxh3": ""}).model_dump_json(indent=1).encode()
        head, _, tail = unsealed_text.rpartition(SEAL % b"")
        return head + SEAL % xxhash.xxh3_128_hexdigest(unsealed_text).encode() + tail

    def is_seal_of(self, text: bytes) -> bool:
        """Whether `text`, from which this was parsed, is exactly the bytes written."""
        head, seal_found, tail = text.rpartition(SEAL % self.xxh3.encode())
        return bool(seal_found) and xxhash.xxh3_128_hexdigest(head + SEAL % b"" + tail) == self.xxh3


def finite_mean(losses: Sequence[float]) -> float | None:
    """The mean of the finite losses; None if there is none."""
    finite_losses = [loss for loss in losses if math.isfinite(loss)]
    # A plain sum of large ones could overflow.
    return sum(finite_loss / len(finite_losses) for finite_loss in finite_losses) if finite_losses else None


def name_of(step: int) -> str:
    return f"step-{step}"


def list_identity(config: ModelConfig) -> dict[str, Any]:
    """The options of a model that affect its weights, as JSON."""
    section_keys = [key.removeprefix("model.").split(".") for key in directory.FREE]
    excluded: dict[str, Any] = {keys[0]: True for keys in section_keys if len(keys) == 1}
    excluded["experts"] = {keys[1] for keys in section_keys if keys[0] == "experts"}
    return config.model_dump(mode="json", exclude=excluded)


def model_fingerprint(config: ModelConfig) -> str:
    """Equal for two models whose weights are interchangeable."""
    return xxhash.xxh3_128_hexdigest(json.dumps(list_identity(config), sort_keys=True).encode())


# Setting aside


SUSPECT = "suspect"


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, so that it no longer counts among those kept. Best effort: it is passed over
    anyway."""
    try:
        _rename(checkpoint, "rejected")
    except OSError as error:
        log.warning("%s: damaged, and could not be renamed: %s", checkpoint, error)
    point_latest(checkpoint.parent)


def set_aside_newer(
    folder: Path, step: int, but: Collection[str] = (), forget: bool = True, why: str = SUSPECT
) -> list[str]:
    """Rename the checkpoints of steps later than `step`, except `but`: the run is rewound past them. Returns their
    names.

    They are kept for inspection as suspect-step-N; with `forget` those of earlier calls are deleted, except pinned
    ones. why: the first part of their names. Raises CheckpointError if one could not be renamed: a restart would
    continue from it.
    """
    older_suspects, renamed_paths = list(folder.glob(f"{SUSPECT}-*")), list[Path]()
    stuck: list[str] = []
    try:
        bring_back(folder)  # else it would come back later as a good one
    except OSError as error:
        stuck.append(str(error))
    for path in newest_first(folder):
        if step_of(path) <= step or path.name in but:
            continue
        try:
            _rename(path, why)
            renamed_paths.append(path)
        except OSError as error:
            stuck.append(str(error))
    point_latest(folder)
    if stuck:
        raise CheckpointError(
            f"{stuck[0]}: a checkpoint later than step {step}, to which the run is rewound, could not be set aside: "
            f"rename or delete those in {folder} by hand, then start again"
        )
    new_names = {f"{SUSPECT}-{renamed_path.name}" for renamed_path in renamed_paths}
    for old_suspect in older_suspects if renamed_paths and forget else ():
        if old_suspect.name not in new_names and not (old_suspect / PINNED).exists():
            shutil.rmtree(old_suspect, ignore_errors=True)
    return [renamed_path.name for renamed_path in renamed_paths]


def _rename(checkpoint: Path, why: str) -> None:
    target_path = checkpoint.with_name(f"{why}-{checkpoint.name}")
    shutil.rmtree(target_path, ignore_errors=True)
    os.replace(checkpoint, target_path)
    durable.sync_directory(checkpoint.parent)


def point_latest(folder: Path) -> None:
    """Point `read_latest` to the newest remaining checkpoint, or remove it: it never names one that was set aside."""
    remaining_checkpoints = newest_first(folder)
    try:
        (folder / LATEST).unlink(missing_ok=True)
        if remaining_checkpoints:
            durable.write_file(folder / LATEST, remaining_checkpoints[0].name.encode())
    except OSError as error:
        log.warning("%s: %s", folder / LATEST, error)


def restore_rng(checkpoint: Path, content: bytes | None = None) -> None:
    """Set this rank's random states from a checkpoint, if it has some for this rank. content: of the file, if it is in
    memory. Raises CheckpointError."""
    rng_path = checkpoint / random_name(dist.get_rank())
    if content is None and not rng_path.exists():
        return
    try:
        file = rng_path if content is None else io.BytesIO(content)
        restore_random_states(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # a malformed file makes torch raise anything
        raise CheckpointError(f"{rng_path}: no random states ({type(error).__name__})") from None


# Finding checkpoints


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


Kind = Literal["checkpoint", "suspect", "rejected", "saving", "replaced", "deleting"]
DELETING = ".deleting-"  # prefix of a checkpoint that is being deleted
_KINDS: dict[str, Kind] = {
    "": "checkpoint",
    f"{SUSPECT}-": "suspect",
    "rejected-": "rejected",
    SAVING: "saving",
    f"{SAVING}replaced-": "replaced",
    DELETING: "deleting",
}
# Those that a person rolled back behind have the number of the rollback in their names.
_NAME = re.compile(rf"({'|'.join(map(re.escape, _KINDS))}|rollback\d+-)step-(0|[1-9][0-9]{{0,17}})")


class FoundCheckpoint(NamedTuple):
    """A folder that is, was or will be a checkpoint."""

    step: int
    kind: Kind
    path: Path


def list_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a folder by step, of all kinds; empty if it does not exist. Raises CheckpointError for a
    folder that cannot be read."""
    try:
        with os.scandir(folder) as inside:
            named = [(match, one) for one in inside if (match := _NAME.fullmatch(one.name)) and one.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    return sorted(
        FoundCheckpoint(int(match[2]), _KINDS.get(match[1], "suspect"), folder / one.name)
        for match, one in named
    )


def newest_first(folder: Path) -> list[Path]:
    """The complete-looking checkpoints of a folder, the newest first."""
    return [one.path for one in reversed(list_checkpoints(folder)) if one.kind == "checkpoint"]


def read_latest(folder: Path) -> str:
    """The name in the file `read_latest`, "" if there is none."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def describe_others(folder: Path) -> str:
    """The end of an error about a missing checkpoint: a list of those in the folder."""
    checkpoint_names = [path.name for path in newest_first(folder)]
    return f"; there are {', '.join(checkpoint_names)}" if checkpoint_names else ""


def read_contents(checkpoint: Path) -> Contents:
    """manifest.json of a checkpoint. Raises CheckpointError if it is missing, damaged or invalid."""
    path = checkpoint / MANIFEST
    if not os.path.isfile(path):  # it may be a folder or a special file
        foreign = sorted(checkpoint.glob("*_states.pt")) or sorted(checkpoint.glob("mp_rank_*"))
        if foreign:
            raise CheckpointError(
                f"{path}: missing, and {foreign[0].name} is there: a checkpoint of DeepSpeed or Megatron themselves? "
                "`megastable checkpoint --help` says how to import one"
            )
        raise CheckpointError(f"{path}: missing or unreadable: the save did not finish")
    contents, manifest_bytes = _read(path, Contents)
    if not contents.is_seal_of(manifest_bytes):
        raise CheckpointError(f"{path}: damaged (its checksum does not match)")
    return contents


def read_state(checkpoint: Path) -> RunState:
    """state.json of a checkpoint. Raises CheckpointError if it is missing or invalid."""
    return _read(checkpoint / STATE, RunState)[0]


def refuse_stability(where: str, error: ValidationError) -> CheckpointError:
    """The error to raise for a part of `RunState.stability` that cannot be read, by its first problem."""
    detail = error.errors()[0]
    key = ".".join(str(path_part) for path_part in detail["loc"])
    return CheckpointError(
        f"what {where} remembers of stability is of another version of megastable ({key}: {detail['msg']}): go on with "
        "that one, or begin a new run with the weights (megastable checkpoint export)"
    )


def _read(path: Path, model: type[M]) -> tuple[M, bytes]:
    """(parsed content, bytes) of a file. Raises CheckpointError for any problem with it."""
    try:
        if not os.path.isfile(path):  # a pipe would block
            raise OSError("not there, or not a file")
        file_bytes = path.read_bytes()
        json_tree = json.loads(file_bytes.decode("utf-8"))
        version = json_tree.get("format") if isinstance(json_tree, dict) else None
        if type(version) is int and version != FORMAT:
            by = make_visible(str(dict(json_tree.get("versions") or {}).get("megastable", "another")))
            raise CheckpointError(
                f"{path}: format {version}, of version {by} of megastable; this is {__version__}, which reads format "
                f"{FORMAT}: use that version"
            )
        return model.model_validate(json_tree), file_bytes
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({str(error).splitlines()[0]})") from None


def verify_checkpoint(checkpoint: Path, part: int = 0, parts: int = 1) -> None:
    """Compare every file (or each `parts`-th from `part` on) with the manifest; CheckpointError where one differs."""
    for problem in _problems(checkpoint, part, parts):
        raise CheckpointError(problem)


def list_problems(checkpoint: Path) -> list[str]:
    """All problems of a checkpoint, a sentence each; empty if it is exactly as written."""
    try:
        return list(_problems(checkpoint, 0, 1))
    except CheckpointError as error:
        return [str(error)]


def _problems(checkpoint: Path, part: int, parts: int) -> Iterator[str]:
    contents = read_contents(checkpoint)
    yield from _list_faults(checkpoint, contents)
    # The largest first: the parts have about the same number of bytes.
    by_size = sorted(contents.files.items(), key=lambda item: (-item[1].size, item[0]))
    for file_name, _ in by_size[part::parts]:
        if problem := explain_file(checkpoint, contents, file_name):
            yield problem


def check_contents(checkpoint: Path) -> Contents:
    """The manifest of a checkpoint in which everything is right that can be seen without reading other files. Raises
    CheckpointError."""
    contents = read_contents(checkpoint)
    for problem in _list_faults(checkpoint, contents):
        raise CheckpointError(problem)
    return contents


def _list_faults(checkpoint: Path, contents: Contents) -> Iterator[str]:
    """What is wrong with a manifest, and with the files beside it that it does not name."""
    if problem := _explain_other_step(checkpoint, contents):
        yield problem
    if not contents.finite:
        yield f"{checkpoint / MANIFEST}: weights or moments are not finite"
    if STATE not in contents.files:
        yield f"{checkpoint / MANIFEST}: does not name {STATE}"
    try:
        present_names = sorted(os.listdir(checkpoint))
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error.strerror}") from None
    for file_name in present_names:
        if PARTS.fullmatch(file_name) and file_name not in contents.files:
            yield f"{checkpoint / file_name}: not in the manifest: of another checkpoint"


def explain_file(
    checkpoint: Path, contents: Contents, file_name: str, read: Callable[[Path], FileRecord] = hash_file
) -> str:
    """What is wrong with a file that the manifest names; "" if it is as written. read: its size and hash; may raise
    OSError."""
    file_record, file_path = contents.files[file_name], checkpoint / file_name
    if "/" in file_name or "\0" in file_name or file_name in ("", ".", ".."):
        return (
            f"{checkpoint / MANIFEST}: names {make_visible(file_name)!r}, which is not a file of a checkpoint"
        )
    try:
        file_stat = file_path.stat()
        if not stat.S_ISREG(file_stat.st_mode):  # a pipe or device would never end
            raise OSError("not a file")
        file_size = file_stat.st_size
        # With another size it may still be another file of this checkpoint.
        is_known_size = any(file_size == other_record.size for other_record in contents.files.values())
        own_record = read(file_path) if is_known_size else None
    except OSError as error:
        return f"{file_path}: {error.strerror or error}"
    if own_record == file_record:
        return ""
    same_names = [other for other, other_record in contents.files.items() if other_record == own_record]
    if same_names:
        return f"{file_path}: its checksum is that of {same_names[0]} in the manifest: swapped"
    if file_size != file_record.size:
        return f"{file_path}: {file_size} bytes, the manifest says {file_record.size}: truncated or changed"
    return f"{file_path}: its checksum is not the manifest's: damaged, or of another checkpoint"


def _explain_other_step(checkpoint: Path, contents: Contents) -> str:
    name_match = _NAME.fullmatch(checkpoint.name)
    if name_match is None or int(name_match[2]) == contents.step:
        return ""
    return f"{checkpoint / MANIFEST}: is of step {contents.step}: another checkpoint's"


def check_sizes(checkpoint: Path) -> Contents:
    """The manifest of a checkpoint whose files all exist with the right sizes: nothing is hashed, for decisions after
    every save and for lists. Raises CheckpointError otherwise."""
    contents = read_contents(checkpoint)
    if problem := _explain_other_step(checkpoint, contents):
        raise CheckpointError(problem)
    for file_name, file_record in contents.files.items():
        file_path = checkpoint / file_name
        try:
            file_size = file_path.stat().st_size
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file_path}: {getattr(error, 'strerror', None) or error}") from None
        if file_size != file_record.size:
            raise CheckpointError(
                f"{file_path}: {file_size} bytes, the manifest says {file_record.size}: truncated or changed"
            )
    return contents


def bring_back(folder: Path) -> None:
    """Restore an older checkpoint that a crash between two renames left complete under another name."""
    for hidden_path in folder.glob(f"{SAVING}replaced-*"):
        target_path = folder / hidden_path.name.removeprefix(f"{SAVING}replaced-")
        if not target_path.exists():
            os.replace(hidden_path, target_path)
        else:
            shutil.rmtree(hidden_path, ignore_errors=True)  # it was already replaced
