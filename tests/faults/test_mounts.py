"""Only a file system that one kernel writes to can hold the embedded store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost import BadUrl, Fencepost
from fencepost.world import disk
from fencepost.world.disk import LOCAL, type_in

if TYPE_CHECKING:
    from pathlib import Path

MOUNTS = r"""
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
22 21 0:20 / /proc rw,nosuid - proc proc rw
23 21 0:21 / /srv/nfs rw shared:2 - nfs4 server:/export rw,vers=4.2
24 21 0:22 / /srv/windows rw - cifs //server/share rw
25 21 0:23 / /srv/ssh rw - fuse.sshfs me@server:/ rw
26 21 0:24 / /srv/host rw - 9p host rw,trans=virtio
27 21 0:25 / /srv/vm rw - virtiofs shared rw
28 21 0:26 / /var/lib/layers rw - overlay overlay rw,lowerdir=/a,upperdir=/b
29 23 0:27 / /srv/nfs/scratch rw - tmpfs tmpfs rw
30 21 8:2 / /mnt/my\040disk rw - xfs /dev/sdb1 rw
31 21 0:28 / /mnt/tab\011and\134slash rw - nfs server:/x rw
32 21 8:3 / /data rw - ext4 /dev/sdc1 rw
33 32 0:29 / /data rw - nfs4 server:/data rw
34 21 0:30 / /cover/inner rw - nfs4 server:/inner rw
35 21 8:4 / /cover rw - btrfs /dev/sdd1 rw
36 21 0:31 / /größe rw master:7 propagate_from:2 - nfs server:/y rw
""".strip().split("\n")


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/opt/mine", "ext4"),
        ("/srv/nfs", "nfs4"),
        ("/srv/nfs/deep/er", "nfs4"),
        ("/srv/nfs-not", "ext4"),
        ("/srv/nfs/scratch/x", "tmpfs"),
        ("/srv/windows", "cifs"),
        ("/srv/ssh/x", "fuse.sshfs"),
        ("/srv/host", "9p"),
        ("/srv/vm", "virtiofs"),
        ("/var/lib/layers/x", "overlay"),
        ("/mnt/my disk/x", "xfs"),
        ("/mnt/my", "ext4"),
        ("/mnt/tab\tand\\slash", "nfs"),
        ("/data/x", "nfs4"),  # the upper one of two on one point
        ("/cover/inner/x", "btrfs"),  # what lies beneath a cover is not there
        ("/größe", "nfs"),
    ],
)
def test_the_mount_that_holds_a_folder(folder: str, kind: str) -> None:
    assert type_in(MOUNTS, folder=folder) == kind


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "fuse.sshfs", "9p", "virtiofs", "autofs"])
def test_what_another_machine_may_write_to_is_not_local(kind: str) -> None:
    assert kind not in LOCAL


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay"])
def test_what_one_kernel_writes_to_is_local(kind: str) -> None:
    assert kind in LOCAL


def test_a_chroot_without_a_root_mount_is_not_known() -> None:
    lines = [MOUNTS[1]]
    assert type_in(lines, folder="/opt") is None
    assert type_in(lines, folder="/proc/self") == "proc"


def test_a_store_on_a_network_disk_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "file_system", lambda _: "nfs4")
    with pytest.raises(BadUrl, match="is on nfs4, which"):
        Fencepost(f"sqlite:///{tmp_path}/leases.db")
    Fencepost(f"sqlite:///{tmp_path}/leases.db?trust_filesystem=1").close()


def test_a_link_to_a_file_elsewhere_is_judged_by_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "here.db").symlink_to(there / "leases.db")
    kinds = {str(there.resolve()): "nfs4"}
    monkeypatch.setattr(disk, "file_system", lambda folder: kinds.get(folder, "ext4"))
    with pytest.raises(BadUrl, match="nfs4"):
        Fencepost(f"sqlite:///{tmp_path}/here.db")
