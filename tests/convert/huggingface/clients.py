"""Programs that read exports, for the tests that have them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[3]


def documented(language: str, word: str) -> str:
    """The one block of docs/checkpoints.md in that language with that word."""
    text = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    (found,) = [b for b in re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S) if word in b]
    return str(found)


@contextlib.contextmanager
def llama_cpp(file: Path) -> Iterator[Callable[[str, dict[str, Any]], list[int]]]:
    """ask("/tokenize" or "/completion", body) -> tokens, of a llama.cpp that has `file`; all in fp32."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.port = str(file), 256, 1, 0
    given.warmup, given.n_gpu_layers, given.cpuparams.n_threads, given.verbosity = False, 0, 1, -1
    given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(given)
    line = http.client.HTTPConnection(server.listening_address.removeprefix("http://"), timeout=PATIENCE)

    def ask(path: str, body: dict[str, Any]) -> list[int]:
        line.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return list(json.load(line.getresponse())["tokens"])

    with contextlib.closing(line):
        yield ask
