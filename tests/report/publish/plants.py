"""Plants a secret in every place of a run directory that somebody can reach, and finds it in a published folder."""

from __future__ import annotations

import base64
import binascii
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from PIL import Image

from megastable.run.directory import RunDirectory
from megastable.run.events import event as kinds
from megastable.run.events.reading import KINDS
from megastable.run.records import LAYER_SCHEMA, LayerRecord, Recorder

BASE64 = re.compile(rb"[A-Za-z0-9+/]{16,}={0,2}")
# Values of fields that hold a number or a list of ranges; all others get a secret.
PLAIN = {kinds.read_whole: 3, kinds.read_real: 3.5, kinds.read_flag: True, kinds.read_pairs: [[1, 2]]}


class Plants:
    """secrets: by the place where they were planted."""

    def __init__(self) -> None:
        self.secrets: dict[str, str] = {}

    def __call__(self, place: str, form: str = "{}") -> str:
        """A new secret, in a text of a form. It is no word that megastable uses, and looks like no other."""
        secret = f"zq{len(self.secrets):04d}xv"
        self.secrets[place] = secret
        return form.format(secret)

    def tree(self, place: str) -> dict[str, Any]:
        return {
            self(f"{place} key"): self(f"{place} value"),
            "below": [{"text": self(f"{place} item", "at {}.")}],
        }


def plant(root: Path, strange: bool) -> Plants:
    """Into a run directory that has a recipe, a journal, step and layer records: that of tests/report/runs.py.

    strange: also what makes that the recipe and the order of the data cannot be used.
    """
    p, run = Plants(), RunDirectory(root)
    _recipe(run, p, strange)
    if strange:
        share = {"name": p("share name"), "path": p("share path", "/mnt/{}"), "weight": 1.0, "tokens": 10}
        blend = {"position": 0, "step": 0, "corpora": [share | {"fingerprint": p("share fingerprint")}]}
        run.blends.write_text(json.dumps(blend) + "\n")
    _journal(run, p)
    for path in (run.progress, run.summary, run.control, run.store):
        known = {"step": 50, "steps": 60, "time": 1090.0, "loss": 4.0, "attempt": 1, "pid": 77_001_234}
        told = {"host": p(f"{path.name} host", "{}.example"), "phase": p(f"{path.name} phase"), "world": 2}
        path.write_text(json.dumps({**known, **told, **p.tree(path.name)}))
    _ledgers(run, p)
    _records(run, p)
    for name in (
        "logs/attempt-0001.log", "logs/rank-0.json", "logs/trackers.log", "incidents/0001/report.html",
        "incidents/0001/samples.txt", "trackers/wandb.json", "tensorboard/events", "profiles/trace.json",
        "notes.txt", ".env", "checkpoints/step-10/state.json", "checkpoints/step-10/manifest.json", "decisions.png",
    ):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"versions": p.tree(name), "xxh3": p(f"{name} hash"), "text": p(name)}))
    (root / "checkpoints" / p("checkpoint folder", "step-{}")).mkdir()
    return p


def _recipe(run: RunDirectory, p: Plants, strange: bool) -> None:
    content = yaml.safe_load(run.recipe.read_text())
    c = content["config"]
    c["run"] |= {"name": p("run.name"), "dir": p("run.dir", "/home/{}/run")}
    c["supervise"] |= {
        "webhook": p("webhook", "https://hooks.example.com/{}"), "command": p("command", "mail -s run {}@example.org"),
        "interface": p("interface"), "metrics_address": p("metrics_address"), "currency": p("currency"),
        "metrics_port": 9137,
    }  # fmt: skip
    c["logging"] |= {
        "project": p("project"), "tracker_command": p("tracker_command", "python {}.py"),
        "trackers": ["tensorboard", "command"],
    }  # fmt: skip
    c["checkpoint"]["staging"] = p("staging", "/scratch/{}")
    c["stability"]["snapshots"]["copies"]["folder"] = p("copies", "/dev/shm/{}")
    c["deepspeed"] = p("deepspeed", "ds/{}.json")
    if strange:
        c["data"]["corpora"].append({"path": p("corpus path", "/data/{}/corpus"), "weight": 1.0})
        c["old_section"] = p.tree("unknown section")
        c["model"]["old_key"] = p("unknown key")
    content["deepspeed_json"] = {"job_name": p("deepspeed_json"), **p.tree("deepspeed_json")}
    content["manifests"] = [p("manifest")]
    content["more"] = p("recipe.yaml")
    run.recipe.write_text(yaml.safe_dump(content))


def _journal(run: RunDirectory, p: Plants) -> None:
    summary = {
        "number": 7, "step": 45, "onset": 45, "kind": p("kind"), "cause": p("cause"), "verdict": "crash",
        "failure": p("failure", "rank 1 on {} was killed: PASSWORD=run"), "reasons": [p("reasons", "as {} said")],
        "warnings": [p("warnings")], "actions": [p("actions")], "outcome": p("outcome"),
        "evidence": ["logs/rank-0.json", p("evidence", "logs/{}.log")], p("summary key"): p("summary value"),
        "documents": [{"corpus": p("corpus"), "shard": p("shard"), "document": 1, "first_token": 2, "tokens": 3}],
    }  # fmt: skip
    with run.journal.open("a") as file:
        for number, (name, kind) in enumerate(KINDS.items()):
            told: dict[str, Any] = {"time": 1100.0 + number, "event": name, "extra": p(f"{name}.extra")}
            for field, hint in get_type_hints(kind, include_extras=True).items():
                read = getattr(hint, "__metadata__", [None])[0]
                if read in PLAIN:
                    told[field] = PLAIN[read]
                elif read is kinds.read_text:
                    told[field] = p(f"{name}.{field}", "up to {} now")
                elif read is kinds.read_items:
                    told[field] = [p(f"{name}.{field}"), p.tree(f"{name}.{field}")]
                elif read in (kinds.read_tree, kinds.maybe_tree):
                    told[field] = p.tree(f"{name}.{field}")
            if name in ("incident", "handover", "unstable", "alert"):
                told |= {"summary": summary, "what": "opened", "number": 7}
            file.write(json.dumps(told) + "\n")
        hosts = [p("last.hosts", "{}.example"), p("last.hosts 2")]
        for last in (
            {"event": "launched", "attempt": 2, "hosts": hosts},
            {"event": "training", "step": 50, "world": 4},
        ):
            file.write(json.dumps({"time": 1299.0, **last}) + "\n")
        closed = {
            "time": 1300.0,
            "event": "incident",
            "what": "closed",
            "step": 50,
            "number": 7,
            "summary": summary,
        }
        file.write(json.dumps(closed) + "\n")
        file.write(
            json.dumps({"time": 1301.0, "event": p("unknown event"), "text": p("unknown event's text")})
            + "\n"
        )
        file.write(p("malformed line", "no JSON {}") + "\n")
        file.write(p("torn line", '{{"time": 1, "event": "{}'))


def _ledgers(run: RunDirectory, p: Plants) -> None:
    sample = {
        "time": "2026-11-26T10:00:00Z", "corpus": p("skips corpus"), "fingerprint": p("skips fingerprint"),
        "tokens": [[0, 32]], "reason": p("skips reason", "data: {} wrote this"), "incident": 1, "step": 3,
        "documents": [{"shard": p("skips shard"), "documents": [4]}],
    }  # fmt: skip
    position = {"first": 3, "end": 5, "reason": p("skips reason 2", "because of {}")}
    run.skips.write_text(f"{json.dumps(sample)}\n{json.dumps(position)}\n{p('skips odd', 'odd {}')}\n")


def _records(run: RunDirectory, p: Plants) -> None:
    path = next(run.steps.glob("*.parquet"))
    table = pq.read_table(path)
    table = table.append_column("extra", pa.array([p("step column")] * len(table)))
    pq.write_table(table.replace_schema_metadata({"who": p("step metadata")}), path)
    (run.steps / p("step file", "{}.parquet")).write_text(p("damaged step file"))
    layers = Recorder(run.layers, 1, LAYER_SCHEMA)
    layers.add_records(
        LayerRecord(25, 1025.0, p("layer", "blocks.{}"), activation_rms=1.0, activation_max=2.0)
    )


def everything(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All that a folder holds, by name: names, bytes, what is encoded or compressed in them, tables."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        yield name, name.encode()
        if not path.is_file():
            continue
        content = path.read_bytes()
        yield from ((name, part) for part in unpacked(content))
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            yield name, repr((table.schema, table.schema.metadata, table.to_pylist())).encode()
        elif path.suffix == ".png":
            with Image.open(path) as picture:
                yield name, repr(picture.info).encode()


def unpacked(content: bytes) -> Iterator[bytes]:
    yield content
    for found in BASE64.finditer(content):
        with suppress(binascii.Error, ValueError):
            inner = base64.b64decode(found[0] + b"=" * (-len(found[0]) % 4))
            yield inner
            with suppress(zlib.error):
                yield zlib.decompress(inner)
