"""Whatever is wrong with the file: one sentence says so, and nothing is half done."""

from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from faultlab import fencepost, url_of

from fencepost import BadUrl, Fencepost, FencepostError, Lease, Misuse, StoreUnavailable
from fencepost.world.sqlite import refuse_old


def refused(url: str, kind: type[FencepostError], *, wait: str = "0s") -> str:
    """Ask, and return the sentence that came back."""
    with fencepost(url) as fp, pytest.raises(kind) as error:
        fp.lock("x", wait=wait).acquire()
    sentence = str(error.value)
    assert "\n" not in sentence
    assert isinstance(error.value, FencepostError)
    return sentence


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "leases.db").write_text("to be or not to be\n" * 500)
    assert "is not a healthy SQLite file" in refused(url_of(tmp_path), Misuse)


def test_a_database_that_was_damaged(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fp.lock("x"):
        pass
    file = tmp_path / "leases.db"
    sound = file.read_bytes()
    file.write_bytes(sound[:100] + b"\xff" * 3000 + sound[3100:])
    assert "is not a healthy SQLite file" in refused(url_of(tmp_path), Misuse)


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "leases.db").mkdir()
    assert "is a folder" in refused(url_of(tmp_path), BadUrl)


@pytest.mark.parametrize("wait", ["0s", "2s"])
def test_a_folder_that_does_not_exist(tmp_path: Path, wait: str) -> None:
    assert "does its folder exist" in refused(url_of(tmp_path / "nowhere"), BadUrl, wait=wait)
    assert os.listdir(tmp_path) == []


def test_a_mistake_is_told_once_and_not_again_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="fencepost"):
        refused(url_of(tmp_path / "nowhere"), BadUrl)
    assert caplog.records == []


def test_a_file_in_place_of_the_folder_of_pulses(tmp_path: Path) -> None:
    (tmp_path / "leases.db-live").touch()
    assert "leases.db-live" in refused(url_of(tmp_path), Misuse)


def test_a_file_of_a_newer_version(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        fp.locks()
    with sqlite3.connect(tmp_path / "leases.db") as database:
        database.execute("UPDATE fencepost_file SET schema = 99")
    database.close()
    assert "newer fencepost (schema 99" in refused(url_of(tmp_path), Misuse)


def test_a_table_that_somebody_changed(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "leases.db") as database:
        database.execute("CREATE TABLE fencepost_lease (name TEXT)")
    database.close()
    assert "not what fencepost left there" in refused(url_of(tmp_path), Misuse)


def test_a_row_about_the_file_that_somebody_deleted_is_made_anew_above_all_tokens(
    tmp_path: Path,
) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        with fp.lock("x") as before:
            pass
        with sqlite3.connect(tmp_path / "leases.db") as database:
            database.execute("UPDATE fencepost_lease SET token = token + 10000000000")
            database.execute("DELETE FROM fencepost_file")
        database.close()
        with pytest.raises(Misuse, match="fencepost_file"):
            fp.lock("y").acquire()
    with fencepost(url_of(tmp_path)) as fp, fp.lock("y") as after:
        assert after.token > before.token + 10000000000


def test_a_file_that_may_not_grow_grants_nothing(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        fp.locks()
        connection = fp._holding._store._file._connection  # type: ignore[attr-defined]
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        leases: list[Lease] = []

        def fill() -> None:
            while True:
                leases.append(fp.lock(f"{len(leases):0500}").acquire())

        with pytest.raises(StoreUnavailable, match="is full: free some space"):
            fill()
        granted = {view.name for view in fp.locks()}
        assert granted == {lease.name for lease in leases}
        connection.execute("PRAGMA max_page_count = 100000")
        with fp.lock(f"{len(leases):0500}") as lease:
            lease.check()


FILL_A_DISK = """
import ctypes, os, sys
from fencepost import Fencepost, StoreUnavailable
folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=256k"):
    print("no disk of our own"); sys.exit()
fp = Fencepost(f"sqlite:///{folder}/leases.db")
with fp.lock("x") as first:
    pass
filler = os.open(folder + "/filler", os.O_WRONLY | os.O_CREAT)
size = 4096
while size:
    try:
        os.write(filler, b"." * size)
    except OSError:
        size //= 2
refused = 0
for number in range(200):
    try:
        with fp.lock("x"):
            pass
    except StoreUnavailable as error:
        assert "is full: free some space" in str(error), error
        refused += 1
        break
assert refused, "the disk never filled up"
assert fp.locks() == [], fp.locks()
os.ftruncate(filler, 0)
with fp.lock("x") as after:
    assert after.token > first.token
fp.close()
print("fine")
"""


def test_a_full_disk_grants_nothing_and_nothing_is_stuck_once_there_is_room(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FILL_A_DISK, str(tmp_path)]
    try:
        ended = subprocess.run(
            ["unshare", "--map-root-user", "--mount", *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if "no disk" in ended.stdout or "unshare" in ended.stderr:
        pytest.skip("no file system may be mounted here")
    assert ended.stdout == "fine\n", ended.stderr


def as_nobody(url: str) -> str:
    """Return the sentence that a user without any rights gets."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        answer = "granted"
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            Fencepost(url).lock("x").acquire()
        except BaseException as error:  # noqa: BLE001 -- told to the parent
            answer = f"{type(error).__name__} {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.wait()
    return answer


@pytest.mark.parametrize("what", ["folder", "file", "folder of pulses"])
def test_what_may_not_be_written(what: str) -> None:
    with TemporaryDirectory() as name:  # unlike tmp_path, below a folder that all may enter
        folder = Path(name)
        if what != "folder":
            with fencepost(url_of(folder)) as fp, fp.lock("x"):
                pass
        if what == "file":
            (folder / "leases.db").chmod(0o444)
        if what == "folder of pulses":
            (folder / "leases.db").chmod(0o666)
            (folder / "leases.db-live").chmod(0o555)
        folder.chmod(0o777 if what == "folder of pulses" else 0o555)
        answer = as_nobody(url_of(folder))
        folder.chmod(0o755)
        if what != "folder":
            (folder / "leases.db-live").chmod(0o755)
    kind, _, sentence = answer.partition(" ")
    assert kind in ("BadUrl", "StoreUnfit"), answer
    assert "write" in sentence or "written" in sentence


def test_an_sqlite_that_is_too_old_is_refused() -> None:
    with pytest.raises(Misuse, match=r"SQLite 3\.34\.1 is too old: 3\.35\.0 or newer"):
        refuse_old((3, 34, 1))
    refuse_old((3, 35, 0))


def test_a_file_that_another_program_keeps_locked_is_said_to_be_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp = Fencepost(url_of(tmp_path))
    fp.locks()
    database = sqlite3.connect(tmp_path / "leases.db", isolation_level=None)
    database.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="is busy: another process keeps it locked"):
        fp.lock("x").acquire()
    database.execute("ROLLBACK")
    database.close()
    with fp.lock("x"):
        pass
    fp.close()
