"""A server process: started, waited for, stopped, paused, killed."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from servers.reach import NOBODY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

S = TypeVar("S", bound="Running")
PATIENCE = 60.0
_LOWEST, _HIGHEST = 20_000, 31_000  # below what systems give to clients
_SHARED: dict[type[Running], Running] = {}
# Not the dice that tests seed: two processes would choose the same ports, and meet.
_DICE = random.SystemRandom()


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    while True:
        port = _DICE.randrange(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def reached(port: int) -> bool:
    """Say whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Running:
    """One process that serves a port. Subclasses say how it is started and when it is ready."""

    in_memory = False  # whether its files may be where ``FENCEPOST_SERVERS`` says, if it does

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    # What a kind of server is.

    def prepare(self) -> None:
        """Make what the server needs before its first start."""

    def command(self) -> Sequence[str]:
        """Return the words that start it in the foreground."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return what its environment has beside ours."""
        return {}

    def ready(self) -> bool:
        """Say whether it answers."""
        return reached(self.port)

    # What tests do with it.

    @classmethod
    @contextmanager
    def own(cls) -> Iterator[Self]:
        """Run a server for as long as the block lasts."""
        server = cls.begun()
        try:
            yield server
        finally:
            server.end()

    @classmethod
    def begun(cls) -> Self:
        """Return a server that answers."""
        for last in (False, False, True):
            where = os.environ.get("FENCEPOST_SERVERS") if cls.in_memory else None
            folder = Path(tempfile.mkdtemp(prefix=f"fencepost-{cls.__name__.lower()}-", dir=where))
            folder.chmod(0o711)
            server = cls(folder)
            try:
                server.prepare()
                server.start()
            except PortTaken:
                server.end()
                if last:
                    raise
            except BaseException:
                server.end()
                raise
            else:
                return server
        raise AssertionError("three ports in a row were taken")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start it, and do not wait."""
        words = list(self.command())
        if shutil.which("setpriv"):  # it dies with us, however we die
            words = ["setpriv", "--pdeathsig", "KILL", *words]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it answers, or say what it wrote."""
        assert self.process is not None
        end = time.monotonic() + PATIENCE
        while not self.ready():
            ended = self.process.poll()
            if ended is not None:
                kind = PortTaken if "in use" in self.log().lower() else RuntimeError
                raise kind(f"{type(self).__name__} ended with {ended}: {self.log()[-2000:]}")
            if time.monotonic() > end:
                raise RuntimeError(f"{type(self).__name__} never answered: {self.log()[-2000:]}")
            time.sleep(0.02)

    def log(self) -> str:
        """Return what it wrote."""
        return (self.folder / "log").read_text(errors="replace")

    def stop(self) -> None:
        """End it as an operator would, and wait for that."""
        self._signal(self.gentle)
        self._wait()

    gentle = signal.SIGTERM

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)
        self._wait()

    def pause(self) -> None:
        """Stop all its processes where they are."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill it, and start it again on what it left."""
        self.kill()
        self.start()

    def end(self) -> None:
        """Kill it and remove what it left."""
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, what: signal.Signals) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, what)

    def _wait(self) -> None:
        assert self.process is not None
        self.process.wait(PATIENCE)


class PortTaken(RuntimeError):
    """Somebody took the port before the server could."""


def shared(kind: type[S]) -> S:
    """Return the server of this kind that the tests of this process share."""
    found = _SHARED.get(kind)
    if found is None:
        found = _SHARED[kind] = kind.begun()
        atexit.register(found.end)
    assert isinstance(found, kind)
    return found


def give_to_nobody(folder: Path) -> None:
    """Let the user that ``as_nobody`` becomes write there."""
    if os.getuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
