"""Only a file system of one kernel can hold the embedded store; all others are refused by name.

Two machines on one network file have two boot ids, two clocks and, often, locks that do not reach
from one to the other. Nothing could be promised there, so nothing is.
"""

from __future__ import annotations

import os
import re

from fencepost.errors import BadUrl
from fencepost.model.named import NamedTuple

# fmt: off
LOCAL = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "rootfs",
    "bcachefs", "jfs", "reiserfs", "nilfs2", "ubifs", "ecryptfs",
})
# fmt: on
_OCTAL = re.compile(r"\\([0-7]{3})")  # \040 is a space


def refuse_shared(path: str) -> None:
    """Raise unless ``path`` lies on a file system that only this kernel writes to."""
    kind = file_system(os.path.dirname(os.path.realpath(path)))
    if kind is not None and kind not in LOCAL:
        raise BadUrl(
            f"{path!r} is on {kind}, which other machines might write to: keep the file on "
            "a local disk, or use a database server (?trust_filesystem=1 if you know better)"
        )


def file_system(folder: str) -> str | None:
    """Return the type of the file system that holds ``folder``; None where nobody can tell."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return None
    return type_in(lines, folder=os.path.realpath(folder))


class Mount(NamedTuple):
    """One line of mountinfo, as far as it matters."""

    id: str
    parent: str
    point: str
    kind: str


def type_in(mountinfo: list[str], *, folder: str) -> str | None:
    """Return the type of the mount in which a walk from the root to ``folder`` ends.

    A mount is entered only from the mount that it hangs on. So of two on one point the upper one
    counts, and one that lies beneath another, covered, does not.
    """
    mounts = [_parsed(line) for line in mountinfo if line]
    here: Mount | None = None
    path = ""
    for part in ["/", *filter(None, folder.split("/"))]:
        path = os.path.join(path, part)
        while (entered := _entered(mounts, path, here)) is not None:
            here = entered
    return None if here is None else here.kind


def _entered(mounts: list[Mount], point: str, here: Mount | None) -> Mount | None:
    for mount in mounts:
        on_top = here is None or (mount.parent == here.id and mount.id != here.id)
        if mount.point == point and on_top:
            return mount
    return None


def _parsed(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    number, parent, _, _, point, *_ = left.split(" ")
    return Mount(number, parent, _OCTAL.sub(_character, point), right.split(" ")[0])


def _character(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 8))
