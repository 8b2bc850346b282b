"""A TCP link with a round-trip time: connections, requests and answers cost what they do far away.

    python tools/far_link.py TARGET_PORT --port PORT --rtt-ms 20

A connection is usable one round trip after it was asked for; bytes are half a round trip under way, in each direction.
TLS runs through it, so that its handshake costs its own round trips. Bandwidth is not bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys


class _Far(asyncio.Protocol):
    """The connection to the target."""

    def __init__(self, near: _Near) -> None:
        self._near = near
        self._transport: asyncio.WriteTransport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.writelines(self._early)

    def send(self, data: bytes) -> None:
        if self._transport is None:
            self._early.append(data)
        else:
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._near.later(self._near.answer, data)

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self._near.later(self._near.close)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Near(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, target: int, rtt: float) -> None:
        self._target, self._rtt = target, rtt
        self._loop = asyncio.get_running_loop()
        self._far = _Far(self)
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._open = self._loop.time() + self._rtt
        self._task = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self._loop.create_connection(lambda: self._far, "127.0.0.1", self._target)
        except OSError:
            self._transport.close()

    def later(self, act: object, *given: object) -> None:
        """Do something when what is sent now has arrived."""
        # asyncio keeps no order of what is due at one time.
        self._due = max(self._due + 1e-6, max(self._loop.time(), self._open) + self._rtt / 2)
        self._loop.call_at(self._due, act, *given)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self.later(self._far.send, data)

    def answer(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        del error
        self.later(self._far.close)


async def _serve(port: int, target: int, rtt: float) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: _Near(target, rtt), "127.0.0.1", port, backlog=1000
    )
    await server.serve_forever()


def main() -> int:
    """Run the link until it is killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=int)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    given = parser.parse_args()
    asyncio.run(_serve(given.port, given.target, given.rtt_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
