"""The link of the throughput benchmark charges what distance costs, and changes no byte."""

from __future__ import annotations

import http.client
import os
import time
from contextlib import closing
from urllib.parse import urlsplit

from tools.bench_server import far
from tools.range_server import RangeServer

RTT_S = 0.05


def test_a_connection_costs_a_round_trip_and_each_request_one_more(tmp_path):
    """No first answer before two round trips, no later one before one; a megabyte comes through as it is."""
    data = os.urandom(1 << 20)
    (tmp_path / "a.bin").write_bytes(data)
    with RangeServer(tmp_path) as server, far(urlsplit(server.base_url).port, 1000 * RTT_S) as port:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
            for least in (2, 1):
                started = time.monotonic()
                connection.request("GET", "/a.bin")
                assert data == connection.getresponse().read()
                assert time.monotonic() - started >= least * RTT_S


def test_a_target_that_is_gone_closes_the_connection(tmp_path):
    """Nobody waits for a server that is not there."""
    with RangeServer(tmp_path) as server:
        target = urlsplit(server.base_url).port
    with far(target, 1) as port, closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as one:
        one.request("GET", "/")
        try:
            one.getresponse()
        except (http.client.BadStatusLine, ConnectionError):
            return
    raise AssertionError
