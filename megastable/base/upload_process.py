"""Uploads files to an object store in a process of its own, at the lowest priority: the process that trains gives it
neither its interpreter nor its cores.

    python -m megastable.base.upload_process URL     answers each line of its input, {"path", "key", "xxh3"}, with one

It ends with its input, at the latest after the file that it is uploading.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import xxhash

from megastable.base.errors import DataError, MegastableError
from megastable.base.object_store import DeniedError, ObjectStore, StoreError

BLOCK = 1 << 22  # bytes read and hashed at a time


class UploadProcess:
    """One thread uses it. The process starts with the first file, and again after it has died."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._process: subprocess.Popen[str] | None = None

    def upload_file(self, path: Path, key: str, xxh3: str) -> None:
        """Upload a file whose hash is still the given one.

        Raises FileNotFoundError if it has gone, DataError if it is another one now, DeniedError and StoreError.
        """
        if self._process is None or self._process.poll() is not None:
            words = [sys.executable, "-m", "megastable.base.upload_process", self.url]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                words, stdin=pipe, stdout=pipe, text=True, start_new_session=True
            )
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps({"path": str(path), "key": key, "xxh3": xxh3}) + "\n")
            requests.flush()
            answer_line = answers.readline()
        except OSError as error:
            raise StoreError(f"{self.url}/{key}: the process that uploads has ended: {error}") from None
        if not answer_line.endswith("\n"):
            raise StoreError(f"{self.url}/{key}: the process that uploads has ended")
        problem, text = json.loads(answer_line)
        if problem:
            kinds = {"missing": FileNotFoundError, "changed": DataError, "denied": DeniedError}
            raise kinds.get(problem, StoreError)(text)

    def close(self) -> None:
        """End the process; it does not wait for an upload that is under way."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def answer_requests(store: ObjectStore, requests: IO[str], answers: IO[str]) -> None:
    """Upload what the lines say, until there are no more."""
    for line in requests:
        request, answer = json.loads(line), ("", "")
        try:
            path = Path(request["path"])
            if hash_content(path) != request["xxh3"]:
                answer = "changed", f"{path}: not what it was when it was written"
            else:
                store.upload_file(path, request["key"])
        except FileNotFoundError as error:
            answer = "missing", str(error)
        except DeniedError as error:
            answer = "denied", str(error)
        except OSError as error:
            answer = "failed", str(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def hash_content(path: Path) -> str:
    """xxh3-128 (hex) of a file. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while file_block := file.read(BLOCK):
            digest.update(file_block)
    return digest.hexdigest()


if __name__ == "__main__":
    os.nice(19)
    try:
        object_store = ObjectStore(sys.argv[1])
    except MegastableError as error:
        raise SystemExit(str(error)) from None
    with suppress(BrokenPipeError, KeyboardInterrupt):
        answer_requests(object_store, sys.stdin, sys.stdout)
