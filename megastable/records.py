"""Step records: what every step measured, columnar, in steps/*.parquet.

A file holds the steps of one flush and is complete when it has its name. After a restart from an older
checkpoint the same steps are recorded again: `read` keeps the newest record of each.
"""

from __future__ import annotations

import io
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megastable import durable
from megastable.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """One step. Losses in nats per token, times in seconds, memory in GiB; None = not measured at this step.

    first_position, next_position: the data cursor before and after; the step trained on the positions between
    them that the skip ledger did not name. mfu_full and mfu_causal: share of the peak, with the whole attention
    square or its causal half counted.
    """

    step: int
    time: float
    first_position: int
    next_position: int
    applied: bool
    loss: float
    z_loss: float
    grad_norm: float
    lr: float
    worst_position: int
    worst_loss: float
    seconds: float
    data_seconds: float
    tokens_per_second: float
    mfu_full: float
    mfu_causal: float
    memory: float
    loss_scale: float
    parameter_norm: float | None = None
    second_moment_norm: float | None = None


_ARROW = {"int": pa.int64(), "bool": pa.bool_(), "float": pa.float32(), "float | None": pa.float32()}
SCHEMA = pa.schema(
    [(f.name, pa.float64() if f.name == "time" else _ARROW[str(f.type)]) for f in fields(StepRecord)]
)


class Recorder:
    """Collects records and writes a file every `flush_steps` of them."""

    def __init__(self, folder: Path, flush_steps: int) -> None:
        self.folder, self.flush_steps = folder, flush_steps
        self.pending: list[StepRecord] = []

    def add(self, record: StepRecord) -> None:
        self.pending.append(record)
        if len(self.pending) % self.flush_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. When the disk refuses, that is logged, and it stays pending."""
        if not self.pending:
            return
        table = pa.Table.from_pylist([asdict(r) for r in self.pending], schema=SCHEMA)
        first, last = self.pending[0], self.pending[-1]
        path = self.folder / f"{first.step:08d}-{last.step:08d}-{int(last.time * 1000)}.parquet"
        content = io.BytesIO()
        # A file is small: dictionaries, statistics and Arrow's own schema would be half of it.
        pq.write_table(
            table,
            content,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            store_schema=False,
        )
        try:
            durable.write_file(path, content.getvalue())
        except OSError as error:
            log.warning("%s: %s; %d step records wait in memory", path, error, len(self.pending))
        else:
            self.pending.clear()


def read(folder: Path) -> pa.Table:
    """All records of a run, by step, the newest of each. Raises DataError naming a damaged file."""
    tables = []
    for path in sorted(folder.glob("*.parquet")):
        try:
            tables.append(pq.read_table(path, schema=SCHEMA))
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path}: not a readable record file ({error}): remove it to go on without"
            ) from None
    if not tables:
        return SCHEMA.empty_table()
    table = pa.concat_tables(tables).sort_by([("step", "ascending"), ("time", "ascending")])
    steps = table.column("step").to_pylist()
    newest = [i for i in range(len(steps)) if i + 1 == len(steps) or steps[i + 1] != steps[i]]
    return table.take(newest)
