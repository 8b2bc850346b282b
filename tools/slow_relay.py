"""A relay in front of a TCP port that can be made slow or silent."""

from __future__ import annotations

import socket
import threading
import time


class SlowRelay:
    """Forwards a port; each answer waits ``delay_s``, for ever where that is infinite."""

    def __init__(self, port: int) -> None:
        """Listen."""
        self.delay_s = 0.0
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                until = time.monotonic() + self.delay_s
                while slow and time.monotonic() < until and self.delay_s:
                    time.sleep(0.01)
                target.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, target):
                one.close()

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()
