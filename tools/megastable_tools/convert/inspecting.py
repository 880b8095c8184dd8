"""`verify_checkpoints`: check every file of checkpoints against their manifests, in parallel, and describe the
problems."""

from __future__ import annotations

import difflib
import fnmatch
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable.base.progress_bar import show_bar
from megastable.base.text import count_noun, make_visible, show_duration, show_number, show_size
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import CHUNK, PieceStatistics
from megastable.checkpoint.whole import WholeState, run_of
from megastable.config import recipe
from megastable.config.model import ModelConfig
from megastable.report.sheet import Column, Sheet

NAME = re.compile(r"(\w+-)?step-\d+")  # names of checkpoints, including those set aside
PARTS = 64  # work units per checkpoint, for the threads

VERIFY_COLUMNS = (
    Column("checkpoint", "checkpoint"),
    Column("outcome", "outcome"),
    Column("files", "files", "count"),
    Column("size", "size", words=True),
    Column("problem", "problem"),
)


@dataclass(frozen=True)
class Verified:
    """A checkpoint, the number of files and bytes in its manifest, and its problems."""

    checkpoint: Path
    files: int
    size: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()  # on its markers, which are not part of it


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoints that `path` names: one, those of a run (the newest first), or RUN/checkpoints/latest. Unverified.

    Raises CheckpointError if there are none.
    """
    path = recipe.find_recipe(path)
    if path.name == store.LATEST and path.is_file():
        try:
            path = path.parent / path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
    checkpoint_folder = path if path.name == "checkpoints" else path / "checkpoints"
    if (path / store.STATE).exists() or (path / store.MANIFEST).exists():
        return [path]
    if NAME.fullmatch(path.name) and not checkpoint_folder.is_dir():
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such checkpoint{store.describe_others(path.parent)}")
        return [path]
    if not checkpoint_folder.is_dir():
        what = "neither a checkpoint nor the directory of a run" if path.exists() else "there is no such path"
        try:
            run_names = sorted(one.name for one in path.parent.iterdir() if (one / "checkpoints").is_dir())
        except OSError:
            run_names = []
        near_names = difflib.get_close_matches(path.name, run_names, n=5, cutoff=0.3) or run_names[:5]
        hint = ": give a run such as runs/mine, or a checkpoint such as runs/mine/checkpoints/step-500"
        if near_names:
            hint = f"; runs in {path.parent}: {', '.join(near_names)}"
        raise CheckpointError(f"{path}: {what}{hint}")
    found_checkpoints = store.newest_first(checkpoint_folder)
    if not found_checkpoints:
        raise CheckpointError(f"{checkpoint_folder}: holds no checkpoint")
    return found_checkpoints


def verify_checkpoints(paths: Sequence[Path], silent: bool = False) -> list[Verified]:
    """Check all checkpoints that `paths` name. Raises CheckpointError for a path that names none."""
    checkpoints = list(dict.fromkeys(one for named_path in paths for one in checkpoints_of(named_path)))
    counts, threads = [_parts(one) for one in checkpoints], min(16, len(os.sched_getaffinity(0)))
    with (
        show_bar("verifying", sum(counts), silent, "files") as watch_bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        return [_check(one, parts, pool, watch_bar) for one, parts in zip(checkpoints, counts)]


def find_good_checkpoint(path: Path, silent: bool = False) -> Path:
    """The verified checkpoint that `path` names: for a run its newest good one. Raises CheckpointError."""
    named_checkpoints = checkpoints_of(path)
    problems: tuple[str, ...] = ()
    for named_checkpoint in named_checkpoints:
        ruling = markers.read_bad_ruling(named_checkpoint) if len(named_checkpoints) > 1 else None
        if ruling is not None:
            problems = (ruling.reason,)
        else:
            problems = verify_checkpoints([named_checkpoint], silent)[0].problems
        if not problems:
            return named_checkpoint
        if len(named_checkpoints) > 1:
            print(f"skipped: {make_visible(problems[0])}", file=sys.stderr)
    more_text = f" ({count_noun(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
    raise CheckpointError(
        f"{problems[0]}{more_text}: it is not used. All of its problems: "
        f"megastable checkpoint verify {shlex.quote(str(path))}"
    )


def _parts(checkpoint: Path) -> int:
    try:
        return max(1, min(PARTS, len(store.read_contents(checkpoint).files)))
    except CheckpointError:
        return 1  # `problems` reports the error


def _check(checkpoint: Path, parts: int, pool: ThreadPoolExecutor, watch: Callable[[int], None]) -> Verified:
    def part(number: int) -> bool:
        try:
            store.verify_checkpoint(checkpoint, number, parts)
        except CheckpointError:
            return False
        finally:
            watch(1)
        return True

    is_good = all(list(pool.map(part, range(parts))))  # hashing releases the GIL
    found_problems, file_count, manifest_size = [], 0, 0
    try:
        found_problems = [] if is_good else store.list_problems(checkpoint)  # once more, to get all of them
        manifest_contents = store.read_contents(checkpoint)
        file_count, manifest_size = len(manifest_contents.files), manifest_contents.size
    except CheckpointError as error:
        found_problems = found_problems or [str(error)]
    marker_notes = markers.list_marker_problems(checkpoint)
    if (quarantine_marker := markers.read_bad_ruling(checkpoint)) is not None:
        marker_notes.append(f"{checkpoint}: a run quarantined it: {quarantine_marker.reason}")
    return Verified(checkpoint, file_count, manifest_size, tuple(found_problems), tuple(marker_notes))


def verified_sheet(found: Sequence[Verified]) -> Sheet:
    """A row for each problem, and for each checkpoint without one."""
    rows = [
        {
            "checkpoint": str(one.checkpoint), "outcome": "damaged" if one.problems else "good", "files": one.files,
            "size": show_size(one.size), "bytes": one.size,
                "problem": problem.removeprefix(f"{one.checkpoint}{os.sep}"),
        }
        for one in found
        for problem in one.problems or ("",)
    ]  # fmt: skip
    damaged_count = sum(1 for one in found if one.problems)
    lead = f"{damaged_count} of {count_noun(len(found), 'checkpoint')} cannot be trusted" if damaged_count else (
        f"{count_noun(len(found), 'checkpoint')}, all files match their manifests"
    )  # fmt: skip
    return Sheet(
        "verified", lead=[lead], columns=VERIFY_COLUMNS, rows=rows, notes=[n for one in found for n in one.notes],
        data={"checkpoints": len(found), "damaged": damaged_count},
    )  # fmt: skip


# `show_checkpoint`: the facts of one checkpoint, and the statistics of its tensors recorded when it was written


SHOW_COLUMNS = (
    Column("name", "tensor"),
    Column("shape", "shape"),
    Column("kind", "of"),
    Column("norm", "norm", "number"),
    Column("rms", "rms", "number"),
    Column("absmax", "max |x|", "number"),
    Column("mean", "mean", "number"),
    Column("nonfinite", "not finite", "count"),
    Column("elements", "elements", "count"),
)


@dataclass(frozen=True)
class Shown:
    """facts: a tree for JSON; sheet: a table with a row for each tensor."""

    facts: dict[str, Any]
    sheet: Sheet


def show_checkpoint(path: Path, pattern: str | None = None) -> Shown:
    """The checkpoint that `path` names (for a run its newest), not verified. pattern: of tensors, * and ? as in a
    shell.

    Raises CheckpointError, also if no tensor matches the pattern.
    """
    checkpoint = checkpoints_of(path)[0]
    contents, state, run = store.read_contents(checkpoint), store.read_state(checkpoint), run_of(checkpoint)
    whole = WholeState(checkpoint)

    def asked(name: str) -> bool:
        return pattern is None or fnmatch.fnmatchcase(name, pattern)

    rows = [sheet_row for name in filter(asked, whole.names) for sheet_row in _rows(whole, name)]
    rows += [
        {"name": name, "kind": "shared", "shape": list(tensor.shape), "elements": tensor.numel()}
        for name, tensor in whole.shared.items()
        if asked(name)
    ]
    if not rows:
        near = ", ".join(whole.names[:3])
        raise CheckpointError(f"{checkpoint}: no tensor is named like {pattern!r}; there are {near}, ...")
    count = sum(math.prod(whole.shape_of(name)) for name in whole.names)
    health, pinned = markers.read_health(checkpoint), markers.read_pin(checkpoint)
    ruling, accepted = markers.read_bad_ruling(checkpoint), markers.read_acceptance(checkpoint)
    doubts = markers.list_marker_problems(checkpoint)
    proven = "not proven"
    if health is not None:
        steps_text = count_noun(health.steps, "step")
        proven = f"yes: {steps_text} after it stayed on trend, up to step {health.step:,}"
    probed = "none: a start cannot check its losses"
    if state.vitals is not None and (losses := state.vitals.losses):
        doubt = f"; {state.vitals.doubt}" if state.vitals.doubt else ""
        probed = f"{len(losses)}, mean loss {fmean(losses):.4f} when it was saved{doubt}"
    tree = {
        "checkpoint": str(checkpoint), "bytes": contents.size, "files": len(contents.files), "parameters": count,
        "optimizer": whole.stateful, "model": run.model.model_dump(mode="json"),
        "state": state.model_dump(exclude={"stability"}), "fingerprints": contents.fingerprints,
        "versions": contents.versions or state.versions, "finite": contents.finite,
        "health": health and health.model_dump(), "pinned": pinned and pinned.model_dump(), "markers": doubts,
        "quarantined": ruling and ruling.model_dump(), "accepted": accepted and accepted.model_dump(),
        "tensors": rows,
    }  # fmt: skip
    facts = [
        ("model", _model(run.model)), ("parameters", f"{count:,}"),
        ("optimizer", f"{state.optimizer}, {state.adam_step:,.0f} updates" if whole.stateful else "none"),
        ("step", f"{state.step:,} ({count_noun(state.updates, 'update')})"), ("tokens", f"{state.tokens:,}"),
        ("data position", f"{state.cursor:,}"), ("trained for", show_duration(state.seconds)),
        ("loss", show_number(state.recent_loss)), ("layout", str(state.layout)),
        ("size", f"{show_size(contents.size)} in {count_noun(len(contents.files), 'file')}"),
        ("finite", "yes" if contents.finite else "no"),
        *((f"fingerprint of the {fingerprint_key}", value) for fingerprint_key, value in contents.fingerprints.items()),
        *((f"{key} that wrote it", value) for key, value in (contents.versions or state.versions).items()),
        ("healthy", proven), ("probe samples", probed),
        *([("quarantined", ruling.reason)] if ruling else []),
        *([("accepted", accepted.reason or "yes")] if accepted else []),
        *([("pinned", pinned.reason or "yes")] if pinned else []),
    ]  # fmt: skip
    lead = ["Not verified here: use verify for that."]
    sheet = Sheet(str(checkpoint), lead=lead, facts=facts, columns=SHOW_COLUMNS, rows=rows, notes=doubts)
    return Shown(tree, sheet)


def _model(model: ModelConfig) -> str:
    model_text, rope_scaling = "", model.rope_scaling
    if (experts := model.experts) is not None:
        experts_text = count_noun(experts.count, "expert")
        model_text += f", {experts_text} of width {model.expert_width:,}, {experts.top_k} of them for a token"
        model_text += f", {experts.shared} shared" if experts.shared else ""
        dense_text = count_noun(experts.first_dense, "layer")
        model_text += f", the first {dense_text} without" if experts.first_dense else ""
    if model.tied:
        model_text += ", tied"
    if model.qkv_bias:
        model_text += ", biases of queries, keys and values"
    if rope_scaling is not None:
        model_text += f", rotary scaling {rope_scaling.kind} by {rope_scaling.factor:g}"
    if model.max_positions is not None:
        model_text += f", positions up to {model.max_positions:,}"
    return (
        f"{count_noun(model.layers, 'layer')}, width {model.hidden:,}, {count_noun(model.heads, 'head')} of "
        f"{model.head_width} ({model.key_value_heads} of keys and values), feed-forward {model.ffn_width:,}, "
        f"vocabulary {model.vocab_size:,}{model_text}"
    )


def _rows(whole: WholeState, name: str) -> Iterable[dict[str, Any]]:
    shape = whole.shape_of(name)
    for tensor_kind in whole.kinds_of(name):
        pieces = whole.pieces_of(name)
        one = merge_statistics(
            [
                (piece.numel, piece.statistics[tensor_kind])
                for piece in pieces
                if tensor_kind in piece.statistics
            ]
        )
        elements = math.prod(shape)
        sheet_row = {"name": name, "kind": tensor_kind, "shape": list(shape), "elements": elements}
        if one is not None:
            sheet_row |= one.model_dump() | {"rms": one.norm / math.sqrt(elements) if elements else 0.0}
        yield sheet_row


def merge_statistics(parts: list[tuple[int, PieceStatistics]]) -> PieceStatistics | None:
    """Statistics of a tensor, from those of its pieces with their numbers of elements."""
    element_total = sum(piece_elements for piece_elements, _ in parts)
    if not element_total:
        return None
    largest_values = [part.absmax for _, part in parts]
    return PieceStatistics(
        nonfinite=sum(part.nonfinite for _, part in parts),
        norm=math.sqrt(sum(part.norm**2 for _, part in parts)),
        absmax=math.nan if any(map(math.isnan, largest_values)) else max(largest_values),
        mean=math.fsum(part.mean * (piece_elements / element_total) for piece_elements, part in parts)
        if all(math.isfinite(part.mean) for _, part in parts)
        else sum(part.mean for _, part in parts),
    )


# `diff`: two checkpoints, tensor by tensor and field by field, for any layouts. Tensors are first compared byte by
# byte, so that "identical" is exact, and only measured if they differ. Memory: one tensor of each side.


Shape = tuple[int, ...]
Outcome = Literal["identical", "differs", "shapes differ", "only in A", "only in B"]
# State fields that count as a difference; the others say how and when it was computed, and are only shown.
WHERE = ("step", "updates", "cursor", "tokens", "trained_tokens", "optimizer", "adam_step")

DIFF_COLUMNS = (
    Column("name", "tensor"),
    Column("kind", "of"),
    Column("outcome", "outcome"),
    Column("max_abs", "max |B - A|", "number"),
    Column("relative", "||B - A|| / ||A||", "number"),
    Column("one_minus_cosine", "1 - cosine", "number"),
    Column("differing", "differing", "count"),
    Column("elements", "elements", "count"),
    Column("shape_a", "shape in A", wide=True),
    Column("shape_b", "shape in B", wide=True),
)


@dataclass(frozen=True, slots=True)
class Distance:
    """How far B is from A. differing: elements whose bytes differ; max_abs: of B - A; relative: ||B - A|| / ||A||;
    cosine: of the angle between them. Non-finite values make these nan, tensors of zeros their ratios.
    """

    differing: int
    max_abs: float
    relative: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of both. shape_a, shape_b: None if it is missing; distance: if measured."""

    name: str
    kind: str
    outcome: Outcome
    shape_a: Shape | None
    shape_b: Shape | None
    distance: Distance | None = None

    def sort_key(self) -> tuple[float, str, str]:
        """The largest difference first: incomparable tensors, then nan, then numbers."""
        size = 0.0 if self.outcome == "identical" else math.inf
        if self.distance is not None and not math.isnan(self.distance.relative):
            size = self.distance.relative
        return -size, self.name, self.kind


def measure_distance(a: Tensor, b: Tensor) -> Distance | None:
    """The distance of two tensors of one shape, both fp32 or both fp64; None if all bytes are equal. Sums are in fp64,
    chunk by chunk."""
    a, b = a.flatten(), b.flatten()
    bit_dtype = torch.int32 if a.dtype == torch.float32 else torch.int64
    if torch.equal(a.view(bit_dtype), b.view(bit_dtype)):
        return None
    differing, largest = 0, 0.0
    square_sums = torch.zeros(4, dtype=torch.float64)  # of A, of B, their product, of B - A
    for chunk_a, y in zip(a.split(CHUNK), b.split(CHUNK)):
        differing_mask = chunk_a.view(bit_dtype) != y.view(bit_dtype)
        differing += int(differing_mask.sum())
        chunk_a, y = chunk_a.double(), y.double()
        # Elements with equal bytes do not differ, not even infinities or NaNs.
        apart = torch.where(differing_mask, y - chunk_a, 0.0)
        square_sums += torch.stack([chunk_a.dot(chunk_a), y.dot(y), chunk_a.dot(y), apart.dot(apart)])
        step = float(apart.abs().max()) if len(apart) else 0.0
        largest = step if math.isnan(step) else max(step, largest) if not math.isnan(largest) else largest
    of_a, of_b, dot_product, of_apart = square_sums.tolist()
    norm_product = math.sqrt(of_a) * math.sqrt(of_b)
    relative = math.sqrt(of_apart) / math.sqrt(of_a) if of_a else math.inf if of_apart else 0.0
    cosine = dot_product / norm_product if norm_product else math.nan
    return Distance(differing, largest, relative, min(1.0, max(-1.0, cosine)) if cosine == cosine else cosine)


def list_differences(
    a: WholeState, b: WholeState, watch: Callable[[int], None] = lambda _: None, weights_only: bool = False
) -> list[Difference]:
    """Every tensor of A or B, the largest difference first. watch: called with the number of elements just compared."""
    found = []
    for name, kind, shape_a, shape_b in pair_tensors(a, b, weights_only):
        same_shape = shape_a == shape_b
        far = measure_distance(a.read_tensor(name, kind), b.read_tensor(name, kind)) if same_shape else None
        found.append(Difference(name, kind, name_outcome(shape_a, shape_b, far), shape_a, shape_b, far))
        watch(math.prod(shape_a or shape_b or ()))
    return sorted(found, key=Difference.sort_key)


def compare_shared_state(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Difference]:
    """Those of the optimizer's shared state, in fp64, which holds every number of it exactly."""
    found = []
    for name in sorted(a.keys() | b.keys()):
        shape_a, shape_b = (tuple(side[name].shape) if name in side else None for side in (a, b))
        far = measure_distance(a[name].double(), b[name].double()) if shape_a == shape_b else None
        found.append(Difference(name, "shared", name_outcome(shape_a, shape_b, far), shape_a, shape_b, far))
    return found


def name_outcome(shape_a: Shape | None, shape_b: Shape | None, far: Distance | None) -> Outcome:
    if shape_a is None or shape_b is None:
        return "only in A" if shape_b is None else "only in B"
    if shape_a != shape_b:
        return "shapes differ"
    return "identical" if far is None else "differs"


def pair_tensors(
    a: WholeState, b: WholeState, weights_only: bool = False
) -> Iterator[tuple[str, str, Shape | None, Shape | None]]:
    """(name, kind, shape in A, shape in B) of everything that A or B holds, the kinds of a tensor together."""
    names_a, names_b = set(a.names), set(b.names)
    kinds = ["weight"] if weights_only else [*a.kinds, *(kind for kind in b.kinds if kind not in a.kinds)]
    for name in sorted(names_a | names_b):
        shapes = a.shape_of(name) if name in names_a else None, b.shape_of(name) if name in names_b else None
        for kind in kinds:
            in_a, in_b = (s is not None and kind in side.kinds_of(name) for s, side in zip(shapes, (a, b)))
            if in_a or in_b:
                yield name, kind, shapes[0] if in_a else None, shapes[1] if in_b else None


def field_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value in A, value in B) of the differences of two trees, keys with dots; None for a missing key."""
    before, after = dict(_leaves(a)), dict(_leaves(b))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        (key, before.get(key), after.get(key))
        for key in keys
        if (key in before) != (key in after) or not _same(before.get(key), after.get(key))
    ]


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field_key, field_value in tree.items():
        if isinstance(field_value, Mapping):
            yield from _leaves(field_value, f"{prefix}{field_key}.")
        else:
            yield f"{prefix}{field_key}", field_value


# Two checkpoints


def compare_checkpoints(
    a: Path, b: Path, weights_only: bool, everything: bool, silent: bool
) -> tuple[Sheet, bool]:
    """The differences, and whether there are none. Both are verified first. everything: also list identical tensors.

    Raises CheckpointError.
    """
    folders = find_good_checkpoint(a, silent), find_good_checkpoint(b, silent)
    left_state, right_state = WholeState(folders[0]), WholeState(folders[1])
    pairs = pair_tensors(left_state, right_state, weights_only)
    byte_count = 4 * sum(math.prod(shape_a or shape_b or ()) for _, _, shape_a, shape_b in pairs)
    with show_bar("comparing", byte_count, silent) as watch_bar:
        found = list_differences(left_state, right_state, lambda count: watch_bar(4 * count), weights_only)
    if not weights_only:
        shared_differences = compare_shared_state(left_state.shared, right_state.shared)
        found = sorted([*found, *shared_differences], key=Difference.sort_key)
    state_trees = [store.read_state(checkpoint_folder).model_dump() for checkpoint_folder in folders]
    differing_fields = field_differences(*state_trees)
    counted_fields = [] if weights_only else [f for f in differing_fields if f[0] in WHERE]
    are_same = not counted_fields and all(one.outcome == "identical" for one in found)
    return _sheet(folders, found, differing_fields, are_same, everything), are_same


def _sheet(
    folders: tuple[Path, Path],
    found: list[Difference],
    fields: list[tuple[str, Any, Any]],
    same: bool,
    everything: bool,
) -> Sheet:
    alike = sum(1 for one in found if one.outcome == "identical")
    tensors_text = count_noun(len(found), "tensor")
    lead_text = f"{alike:,} of {tensors_text} hold the same bytes" if found else "no tensors"
    facts = [("A", str(folders[0])), ("B", str(folders[1])), ("identical", "yes" if same else "no")]
    facts += [(key, f"{_told(a)} -> {_told(b)}") for key, a, b in fields if not key.startswith("stability.")]
    if memory := sum(key.startswith("stability.") for key, *_ in fields):
        facts.append(("stability", f"state of detector and policy differs in {count_noun(memory, 'number')}"))
    rows = [_row(one) for one in found if everything or one.outcome != "identical"]
    data = {
        "a": str(folders[0]), "b": str(folders[1]), "identical": same, "tensors": len(found),
        "tensors_identical": alike, "fields": {key: {"a": a, "b": b} for key, a, b in fields},
    }  # fmt: skip
    return Sheet("differences", lead=[lead_text], facts=facts, columns=DIFF_COLUMNS, rows=rows, data=data)


def _told(value: Any) -> str:
    value_text = "nothing" if value is None else str(value)
    return value_text if len(value_text) <= 100 else f"{value_text[:99]}…"


def _row(one: Difference) -> dict[str, Any]:
    far = one.distance
    sheet_row: dict[str, Any] = {
        "name": one.name, "kind": one.kind, "outcome": one.outcome, "differing": None,
        "elements": math.prod(one.shape_a or one.shape_b or ()),
        "shape_a": one.shape_a and list(one.shape_a), "shape_b": one.shape_b and list(one.shape_b),
    }  # fmt: skip
    if far is not None:
        sheet_row |= {"max_abs": far.max_abs, "relative": far.relative, "cosine": far.cosine}
        sheet_row |= {"one_minus_cosine": 1 - far.cosine, "differing": far.differing}
    return sheet_row
