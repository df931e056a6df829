"""A proxy between a client and a real server that loses, delays and cuts on demand.

It runs in a thread of its own. Its mode holds for all connections, from the next bytes on:

    pass        everything goes through
    hole        nothing goes through in either direction; connections stay open
    hole_up     requests are swallowed: the server never sees them
    hole_down   replies are swallowed: the server did it, and nobody hears of it
    refuse      new connections are reset
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Proxy:
    """``with Proxy(server.port) as proxy: connect to proxy.port``."""

    def __init__(self, upstream: int) -> None:
        self._upstream, self._mode, self.delay = upstream, "pass", 0.0
        self._pairs: set[tuple[StreamWriter, StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._moved = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.swallowed = 0  # bytes that a hole has kept from going on
        self.cut_after = 0  # connections are cut once as many replies more were swallowed
        self.port = 0

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._loop.call_soon(ready.set)
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self.mode = "pass"
        self.reset()
        asyncio.run_coroutine_threadsafe(self._closed(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def connections(self) -> int:
        """How many connections go through it now."""
        return len(self._pairs)

    @property
    def mode(self) -> str:
        """What happens to bytes now."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._mode = mode
        self._loop.call_soon_threadsafe(self._wake)

    def lose_replies(self, count: int = 1) -> None:
        """Swallow the next replies, then cut the connection: the server did what was asked."""
        self.cut_after = count
        self.mode = "hole_down"

    def reset(self) -> None:
        """Cut every connection, on both sides; both know of it when this returns."""
        cut, done = set(self._pairs), threading.Event()
        self._loop.call_soon_threadsafe(self._reset, done)
        done.wait(10)
        give_up = time.monotonic() + 10
        while cut & self._pairs and time.monotonic() < give_up:
            time.sleep(0.001)

    # In the thread of the loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _reset(self, done: threading.Event | None = None) -> None:
        for pair in list(self._pairs):
            for writer in pair:
                wire = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):  # it is closed already
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                writer.transport.abort()
        self._wake()  # who waits at a hole has nothing to wait for any more
        if done is not None:
            done.set()

    async def _closed(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self._mode == "refuse":
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, up_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(
                self._pump(reader, up_writer, "up"), self._pump(up_reader, writer, "down")
            )
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.close()

    async def _pump(self, reader: StreamReader, writer: StreamWriter, way: str) -> None:
        with contextlib.suppress(ConnectionError, OSError):  # either side may be gone: that is why
            while data := await reader.read(65_536):
                if self._mode in (f"hole_{way}", "hole"):
                    self._swallow(data)
                    if self._mode == "hole":
                        await self._moved.wait()
                    continue
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        if way == "down":
            writer.close()
        elif writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()

    def _swallow(self, data: bytes) -> None:
        self.swallowed += len(data)
        if self._mode == "hole_down" and self.cut_after:
            self.cut_after -= 1
            if not self.cut_after:
                self._mode = "pass"
                self._reset()
