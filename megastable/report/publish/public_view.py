"""Gives post-mortems of a public record their names, and the texts of samples, which only the run itself has."""

from __future__ import annotations

from pathlib import Path

from megastable.base.errors import MegastableError
from megastable.config.recipe import find, load
from megastable.config.tree import RunConfig
from megastable.data.blends import BlendEntry, Line, read_blends
from megastable.data.skip_ledger import Ledger
from megastable.report.postmortem.sample_source import PublicView, SampleSource
from megastable.report.publish.public_run import PublicRun
from megastable.report.publish.redaction import Redactor
from megastable.run.directory import RunDirectory


def public_view(run: Path, made: PublicRun) -> PublicView:
    """The view of the run directory `run` for its public copy. Paths of corpora are resolved now, from the working
    directory."""
    source = None
    if made.names.keep.texts:
        try:
            source = _source(RunDirectory(run))
        except (MegastableError, OSError):  # whose message names files
            made.problems.append("the texts of samples: the recipe, the blends or the skips cannot be read")
    return PublicView(Redactor(made.names).text, made.names.of, source)


def _source(run: RunDirectory) -> SampleSource:
    ledger = Ledger.read(run.skips, [])
    return SampleSource(
        _placed(load(run.recipe)), list(map(_found, read_blends(run.blends))), ledger, run.skips
    )


def _placed(config: RunConfig) -> RunConfig:
    corpora = [one.model_copy(update={"path": find(one.path).absolute()}) for one in config.data.corpora]
    return config.model_copy(update={"data": config.data.model_copy(update={"corpora": corpora})})


def _found(line: Line) -> Line:
    if not isinstance(line, BlendEntry):
        return line
    shares = [s.model_copy(update={"path": str(find(Path(s.path)).absolute())}) for s in line.corpora]
    return line.model_copy(update={"corpora": shares})
