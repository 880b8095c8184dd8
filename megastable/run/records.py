"""Writes and reads step records (columnar files steps/*.parquet) and layer records (layers/*.parquet).

record_files.py says how the files are named, ordered and compacted. After a restart from an older checkpoint the same
steps are recorded again: `read_newest_records` keeps the newest record of each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.run.record_files import (
    RecordFile,
    compact_files,
    encode_table,
    list_files,
    name_file,
    read_files,
)

log = logging.getLogger(__name__)
EXPERT = re.compile(
    r"blocks\.(\d{1,6})\.mlp\.experts\.(\d{1,4})"
)  # of layer records: block and number of an expert


def worst_samples(
    losses: Sequence[float], positions: Sequence[int], count: int, micro_batch: int, data: int
) -> dict[str, Any]:
    """The columns of a step's `count` worst samples; losses that are nan come first.

    losses, positions: [global batch] in the step's order, that is [accumulation, data, micro_batch] flattened.
    """
    sample_losses = np.asarray(losses, dtype=np.float64)
    order = np.argsort(-np.nan_to_num(sample_losses, nan=np.inf), kind="stable")[:count]
    worst_index = int(order[0])
    return {
        "worst_position": int(positions[worst_index]), "worst_loss": float(sample_losses[worst_index]),
        "worst_micro_batch": worst_index // (data * micro_batch), "worst_rank": worst_index // micro_batch % data,
        "worst_positions": [int(positions[i]) for i in order], "worst_losses": sample_losses[order].tolist(),
    }  # fmt: skip


@dataclass(frozen=True)
class StepRecord:
    """One step. Losses in nats per token, times in seconds, memory in GiB; None = not measured at this step.

    first_position, next_position: the data cursor before and after; the step trained on the positions between them
    except `skipped`, ranges [first, end) concatenated. samples: how many; piece: length of the pieces that its last
    sample is cut into, in tokens; None in records of older versions. finite: whether loss and gradients were. clipped:
    the update was applied with smaller gradients. z: root of the mean squared log-partition. worst_*: the samples with
    the highest losses, the highest first: absolute positions, and nats per token; of the first one also its micro-batch
    and data-parallel rank (with context parallelism: group of ranks).
    mfu_full and mfu_causal: share of the peak, counting the full attention matrix or its causal half. clipped_fraction:
    of the steps since it was last recorded. norm_kept: the share of the gradient's norm that clipping left, None if the
    update was refused. token_entropy: of the distribution of the batch's tokens, nats: the loss of the best model of
    this batch without context. predictive_entropy: mean entropy of the model's predictions (of every 32nd token),
    nats, at the looks of the slow signals. noise_scale: the smoothed gradient noise scale in samples, None where there
    is no estimate (warnings/noise_scale.py). fp8: 1 or 0, whether the step was computed in FP8, if the recipe asks for
    it. expert_* and router_*: of the worst layer with routed experts, see warnings/expert_loads.py; None without.
    attempt: of the supervisor, None without one. forward_seconds to other_seconds: of rank 0, see step_phases.py;
    on a GPU None in the last record of a file, whose kernels still run when it is written. Other values that may be
    None: see `LayerStatistics` in engine/layer_stats.py.
    """

    step: int
    time: float
    first_position: int
    next_position: int
    skipped: list[int]
    applied: bool
    finite: bool
    clipped: bool
    loss: float
    z_loss: float
    z: float
    grad_norm: float
    lr: float
    worst_position: int
    worst_loss: float
    worst_micro_batch: int
    worst_rank: int
    worst_positions: list[int]
    worst_losses: list[float]
    seconds: float
    data_seconds: float
    tokens_per_second: float
    mfu_full: float
    mfu_causal: float
    memory: float
    loss_scale: float
    clipped_fraction: float | None = None
    norm_kept: float | None = None
    noise_scale: float | None = None
    parameter_norm: float | None = None
    second_moment_norm: float | None = None
    second_moment_max: float | None = None
    update_ratio: float | None = None
    attention_logit: float | None = None
    attention_entropy: float | None = None
    token_entropy: float | None = None
    predictive_entropy: float | None = None
    expert_violation: float | None = None
    expert_idle: float | None = None
    expert_dropped: float | None = None
    router_entropy: float | None = None
    router_z: float | None = None
    samples: int | None = None
    piece: int | None = None
    fp8: float | None = None
    fp8_saturation: float | None = None
    fp8_underflow: float | None = None
    attempt: int | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    reduce_seconds: float | None = None
    exchange_seconds: float | None = None
    gate_seconds: float | None = None
    optimizer_seconds: float | None = None
    other_seconds: float | None = None


@dataclass(frozen=True)
class LayerRecord:
    """One parameter or one block (`name`, as in the whole model) at one step; None = not applicable.

    Of parameters: root mean square and largest magnitude of gradient (before clipping, unscaled), fp32 weight and
    Adam's second moment after the step, and |update| / |weight|. Of blocks: the same two of its output, its largest
    attention logit (scaled, before the softmax) and its mean attention entropy in nats, over all samples, heads and
    queries of the step. Of weights that FP8 multiplies with: the shares of the layer's inputs, weights and gradients
    that saturated and that underflowed to zero. Of experts (`blocks.3.mlp.experts.7`): the tokens that chose it in this
    step over the mean of the layer, and its bias. Of routers (`blocks.3.mlp.router`): the mean entropy of a token's
    scores, nats, and the root mean square of the logsumexp of its logits.
    """

    step: int
    time: float
    name: str
    gradient_rms: float | None = None
    gradient_max: float | None = None
    weight_rms: float | None = None
    weight_max: float | None = None
    second_moment_rms: float | None = None
    second_moment_max: float | None = None
    update_ratio: float | None = None
    activation_rms: float | None = None
    activation_max: float | None = None
    attention_logit: float | None = None
    attention_entropy: float | None = None
    input_saturation: float | None = None
    input_underflow: float | None = None
    weight_saturation: float | None = None
    weight_underflow: float | None = None
    gradient_saturation: float | None = None
    gradient_underflow: float | None = None
    expert_load: float | None = None
    expert_bias: float | None = None
    router_entropy: float | None = None
    router_z: float | None = None


_ARROW = {
    "int": pa.int64(), "bool": pa.bool_(), "str": pa.string(), "float": pa.float32(), "float | None": pa.float32(),
    "int | None": pa.int64(),
    "list[int]": pa.list_(pa.int64()), "list[float]": pa.list_(pa.float32()),
}  # fmt: skip


def make_schema(kind: type[StepRecord] | type[LayerRecord]) -> pa.Schema:
    """The columns of a kind of record: floats take 4 bytes, except the time."""
    return pa.schema(
        [(f.name, pa.float64() if f.name == "time" else _ARROW[str(f.type)]) for f in fields(kind)]
    )


SCHEMA = make_schema(StepRecord)
LAYER_SCHEMA = make_schema(LayerRecord)


class Recorder:
    """Collects records of one schema and writes a file every `flush_steps` steps."""

    def __init__(self, folder: Path, flush_steps: int, columns: pa.Schema = SCHEMA) -> None:
        self.folder, self.flush_steps, self.columns = folder, flush_steps, columns
        self.pending: list[StepRecord | LayerRecord] = []
        self._steps = 0
        self._stamp: int | None = None  # of the newest file

    def add_records(self, *records: StepRecord | LayerRecord) -> None:
        """Add the records of one step; its rows have the same time."""
        self.pending.extend(records)
        self._steps += 1
        if self._steps % self.flush_steps == 0:
            self.flush_records()

    def flush_records(self) -> None:
        """Write pending records. If the disk refuses, that is logged, and they stay pending."""
        if not self.pending:
            return
        record_steps = [pending_record.step for pending_record in self.pending]
        try:
            if self._stamp is None:
                self._stamp = max((file.stamp for file in list_files(self.folder)), default=0)
            # Milliseconds of the last record. A clock may be set back, or be another host's that is behind.
            file_stamp = max(int(self.pending[-1].time * 1000), self._stamp + 1)
            file_path = self.folder / name_file(min(record_steps), max(record_steps), file_stamp)
            durable.write_file(file_path, encode_records(self.pending, self.columns))
        except OSError as error:
            log.warning("%s: %s; %d records wait in memory", self.folder, error, len(self.pending))
        else:
            self._stamp = file_stamp
            self.pending.clear()

    def compact_records(self) -> None:
        """Make few files of many. If the disk refuses, that is logged, and they stay as they are."""
        compact_files(self.folder, self.columns)

    def restore_records(self, file: Path) -> None:
        """Write the step records that a process had pending when it made `file`, if they were not written since.

        Does nothing if there is no such file.
        """
        if not file.exists():
            return
        try:
            rows = [StepRecord(**row) for row in pq.read_table(file, schema=self.columns).to_pylist()]
        except (pa.ArrowException, OSError) as error:  # a lost record is no reason not to train
            log.warning("%s: %s; the records in it are lost", file, error)
            return

        def choose_later(files: list[RecordFile]) -> list[RecordFile]:
            return [file for file in files if not file.stamp or file.stamp >= int(rows[0].time * 1000)]

        key_schema = pa.schema([self.columns.field(name) for name in ("step", "time")])
        written = set[tuple[int, float]]()
        for found in read_files(self.folder, key_schema, choose_later):
            if found.table is not None:  # `read_newest_records` names a damaged one
                written.update(zip(*(column.to_pylist() for column in found.table.columns), strict=True))
        self.pending = [row for row in rows if (row.step, row.time) not in written]
        self.flush_records()


def encode_records(records: Sequence[StepRecord | LayerRecord], columns: pa.Schema = SCHEMA) -> bytes:
    """The content of a file of records."""
    return encode_table(pa.Table.from_pylist([vars(record) for record in records], schema=columns))


def read_newest_records(folder: Path, columns: pa.Schema = SCHEMA, newest: bool = True) -> pa.Table:
    """Read all records of a run, by step.

    Args:
        folder: of the records.
        columns: those given to the `Recorder`.
        newest: of a step that was done again take the newest records, instead of the first.

    Raises:
        DataError: a file is damaged; it is named.
    """
    record_tables = [columns.empty_table()]
    for read_records in read_files(folder, columns):
        if read_records.table is None:
            file_path = folder / read_records.file.name
            raise DataError(
                f"{file_path}: not a readable record file ({read_records.problem}): remove it to go on without"
            )
        record_tables.append(read_records.table)
    record_table = pa.concat_tables(record_tables)
    # Of one step in the order of writing, which is right also if a clock was set back.
    record_table = record_table.take(np.argsort(record_table.column("step").to_numpy(), kind="stable"))
    row_steps, row_times = record_table.column("step").to_numpy(), record_table.column("time").to_numpy()
    last_rows = np.searchsorted(row_steps, row_steps, side="right") - 1
    chosen_times = row_times[last_rows if newest else np.searchsorted(row_steps, row_steps, side="left")]
    return record_table.take(np.flatnonzero(row_times == chosen_times))
