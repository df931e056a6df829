"""A fork shares nothing: not the lease, not the connection, not the place in line."""

from __future__ import annotations

import os
import sqlite3
import threading
from typing import TYPE_CHECKING

from faultlab import Puppet, fencepost, until, url_of, waiters

from fencepost import Fencepost
from fencepost.model.lease import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def in_child(work: Callable[[], object]) -> str:
    """Do ``work`` in a forked child; return what came of it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = str(work())
        except BaseException as error:  # noqa: BLE001 -- it is told to the parent
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


def test_a_child_can_neither_check_nor_release_what_its_parent_holds(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        lock = fp.lock("x")
        lease = lock.acquire()
        assert in_child(lease.check).startswith("LeaseLost: ")
        assert in_child(lambda: lock.release(lease)).startswith("LeaseLost: ")
        assert in_child(lambda: lease.phase) == str(Phase.LOST)
        assert in_child(lease.remaining) == "0.0"
        assert in_child(lease.lost.is_set) == "True"
        assert in_child(lease.lost.wait) == "True"
        lease.check()
        assert [view.token for view in fp.locks()] == [lease.token]
        assert lock.release(lease)


def test_a_child_that_leaves_the_block_or_closes_changes_nothing(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fp.lock("x") as lease:
        lock = fp.lock("y")
        with lock:
            assert in_child(lambda: lock.__exit__(None, None, None)) == "None"
            assert in_child(fp.close) == "None"
            assert [view.name for view in fp.locks()] == ["x", "y"]
        lease.check()


def test_a_child_does_not_renew_what_its_parent_holds(tmp_path: Path) -> None:
    # The parent's keeper lives on in the parent only: once that is gone, so is the lease.
    url = url_of(tmp_path)
    with Puppet(url) as parent, fencepost(url) as fp:
        parent.granted("x", "1s")
        parent.ask("fork", "stays")
        parent.kill()
        with fp.lock("x", wait="30s") as lease:
            lease.check()


def test_a_child_may_acquire_with_the_same_object_and_its_lease_is_kept(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fp.lock("x", ttl="0.5s") as lease:

        def hold() -> bool:
            with fp.lock("y", ttl="0.5s") as own:
                first = own.hold.trust
                until(lambda: own.hold.trust != first)
                own.check()
                return own.token > lease.token

        assert in_child(hold) == "True"
        lease.check()


def test_what_a_child_was_granted_survives_the_end_of_its_parents_connections(
    tmp_path: Path,
) -> None:
    # SQLite deletes its log when the last connection closes. A child whose connection is not
    # counted would go on writing to the deleted one, and two would hold the same lease.
    url = url_of(tmp_path)
    with Puppet(url) as other:
        fp = Fencepost(url)
        lease = fp.lock("x").acquire()
        go_on, go_on_writer = os.pipe()
        granted, granted_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            own = [fp.lock("y").acquire()]
            os.write(granted_writer, b".")
            os.read(go_on, 1)
            own.append(fp.lock("z").acquire())
            os.write(granted_writer, b".")
            os.read(go_on, 1)
            os._exit(0)
        os.read(granted, 1)
        fp.lock("x").release(lease)
        fp.close()
        os.write(go_on_writer, b".")
        os.read(granted, 1)
        answers = [other.ask("acquire", name) for name in ("y", "z")]
        os.write(go_on_writer, b".")
        os.waitpid(pid, 0)
        for fd in (go_on, go_on_writer, granted, granted_writer):
            os.close(fd)
        assert [answer.split()[0] for answer in answers] == ["LeaseHeld", "LeaseHeld"]


def test_a_fork_in_the_midst_of_writing_leaves_the_child_able_to_write(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        enough = threading.Event()

        def write() -> None:
            while not enough.is_set():
                with fp.lock("busy", wait="30s"):
                    pass

        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()

        def acquire_too() -> str:
            with fp.lock("child", wait="5s"):
                return "fine"

        answers = {in_child(acquire_too) for _ in range(20)}
        enough.set()
        for thread in threads:
            thread.join()
        assert answers == {"fine"}


def test_a_child_of_one_who_waits_does_not_stand_in_line_for_it(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as waiter:
        with fp.lock("x"):
            waiter.ask("fork_in_line", "x")
            assert len(waiters(tmp_path)) == 1
            waiter.kill()
        assert waiters(tmp_path) == []  # so it was seen to be dead, although its child lives


def test_forks_of_several_threads_at_once_do_not_block_each_other(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as one, fencepost(f"sqlite:///{tmp_path}/2.db") as two:
        one.locks()
        two.locks()
        threads = [threading.Thread(target=in_child, args=(one.locks,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def test_the_file_is_whole_after_all_that_forking(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp:
        for number in range(10):
            with fp.lock(f"parent-{number}"):
                in_child(lambda: fp.lock("child", wait="5s").acquire())
    with sqlite3.connect(tmp_path / "leases.db") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def test_a_child_of_a_child_has_no_lease_either(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, fp.lock("x") as lease:
        assert in_child(lambda: in_child(lease.check)).startswith("LeaseLost: ")
        lease.check()
