"""Only a file system of one kernel can hold the embedded store; all others are refused by name.

Two machines on one network file have two boot ids, two clocks and, often, locks that do not reach
from one to the other. Nothing could be promised there, so nothing is.
"""

from __future__ import annotations

import os

from fencepost.errors import BadUrl

# fmt: off
LOCAL = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "rootfs",
    "bcachefs", "jfs", "reiserfs", "nilfs2", "ubifs", "ecryptfs",
})
# fmt: on


def refuse_shared(path: str) -> None:
    """Raise unless ``path`` lies on a file system that only this kernel writes to."""
    kind = file_system(os.path.dirname(os.path.abspath(path)))
    if kind is not None and kind not in LOCAL:
        raise BadUrl(
            f"{path!r} is on {kind}, which other machines might write to: keep the file on "
            "a local disk, or use a database server (?trust_filesystem=1 if you know better)"
        )


def file_system(folder: str) -> str | None:
    """Return the type of the file system that holds ``folder``; None where nobody can tell."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    return type_in(lines, folder=os.path.realpath(folder))


def type_in(mountinfo: list[str], *, folder: str) -> str | None:
    """Return the type of the innermost mount around ``folder``; the later of two wins."""
    best, kind = -1, None
    for line in mountinfo:
        left, _, right = line.partition(" - ")
        point = left.split(" ")[4].encode().decode("unicode_escape")  # \040 is a space
        around = point in ("/", folder) or folder.startswith(point + "/")
        if around and len(point) >= best:
            best, kind = len(point), right.split(" ")[0]
    return kind
