"""The file system that hosts share for their run directories: one that can stall and fill up without a disk failing.

An image with ext4 on a loop device, where that is allowed: a frozen file system stalls every writer, uninterruptibly,
as a network file system without its server does. Elsewhere a tmpfs, which can only fill up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from drills.namespaces import READY, command, entering
from megastable.base.errors import ConfigError

SIZE = 1 << 30  # bytes
LONGEST = 900  # seconds that a freeze lasts when nobody ends it
BLOCK = 1 << 20  # bytes of the last writes that fill the disk
BALLAST, FILES = "ballast", 8
MAKE = "mkfs.ext4 -q -F -m 0 -E lazy_itable_init=1,lazy_journal_init=1".split()
# Thaws when its input ends, too, so also when the process that has frozen it is killed: before everything else that
# ends with that process, whose writers nothing can kill while they are frozen.
# By the folder that it stands in: the path may be renamed or removed meanwhile, outside.
FREEZE = f'cd "$0" && fsfreeze -f . && {{ echo {READY}; read -rt {LONGEST} _; fsfreeze -u .; }}'


class SharedDisk:
    """Mounted at `folder` in the mount namespace of process `room`, which alone sees it. size: bytes.

    cannot_freeze: why not, if so.
    """

    def __init__(self, room: int, folder: Path, size: int = SIZE) -> None:
        self._mount, self.folder = entering(room, "mount"), folder
        self.outside = Path(f"/proc/{room}/root") / folder.relative_to("/")  # for a process outside
        self._frozen: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.cannot_freeze = self._mount_image(size)
        if self.cannot_freeze is not None:
            command([*self._mount, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder])

    def _mount_image(self, size: int) -> str | None:
        """Why it cannot be done, if so."""
        image = self.folder.with_suffix(".ext4")
        try:
            with image.open("wb") as file:
                file.truncate(size)
            command([*MAKE, image])
            # The kernel frees the loop device with the last mount, and then the image, which has no name any more.
            command([*self._mount, "mount", "-o", "loop", image, self.folder])
        except (ConfigError, OSError) as error:
            return str(error)
        finally:
            image.unlink(missing_ok=True)
        return None

    def freeze(self) -> None:
        """Stall every writer until `thaw`. Raises ConfigError where that is not possible."""
        if self.cannot_freeze is not None:
            raise ConfigError(f"the shared directory cannot be stalled here: {self.cannot_freeze}")
        if self._frozen is not None:
            return
        freezing = subprocess.Popen(
            [*self._mount, "bash", "-c", FREEZE, self.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert freezing.stdout is not None
        self._frozen = freezing
        if freezing.stdout.readline().strip() != READY:
            _, complaint = freezing.communicate()
            self._frozen = None
            raise ConfigError(f"the shared directory cannot be stalled here: {complaint.strip()}")

    def thaw(self) -> None:
        """Let writers go on; nothing if it is not frozen."""
        if self._frozen is not None:
            self._frozen.communicate()
            self._frozen = None

    def fill(self) -> None:
        """Leave no byte free, until `free`."""
        ballast = self.outside / BALLAST
        ballast.mkdir()
        # The last blocks need several files: a file that takes one may need another one to remember where.
        for number in range(FILES):
            with (ballast / str(number)).open("wb", buffering=0) as file, suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(1, self.room() - BLOCK))
            with (ballast / str(number)).open("ab", buffering=0) as file, suppress(OSError):
                while self.room():
                    file.write(bytes(BLOCK))

    def free(self) -> None:
        """Give back what `fill` took."""
        shutil.rmtree(self.outside / BALLAST, ignore_errors=True)

    def room(self) -> int:
        """Free bytes."""
        found = os.statvfs(self.outside)
        return found.f_bavail * found.f_frsize
