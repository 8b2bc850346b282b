"""The process's threads: bounded pools for reads, for what caches read behind them, for decoding. None outlives a fork.

``FLUXON_GOP_DECODE_THREADS`` sets the bound of the second; without it, it is the number of usable cores. In a
worker process, where the other cores belong to the other workers, a batch keeps to its reader's ``num_threads``.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from fluxon_gop.errors import InvalidRequestError

MAX_REQUESTS_IN_FLIGHT = 64
DECODE_THREADS_VARIABLE = "FLUXON_GOP_DECODE_THREADS"

_lock = threading.Lock()
_pools: dict[str, ThreadPoolExecutor] = {}


def io_pool() -> ThreadPoolExecutor:
    """Return the process's pool of reading threads."""
    return _pools.get("fluxon_gop-io") or _pool("fluxon_gop-io", MAX_REQUESTS_IN_FLIGHT)


def origin_pool() -> ThreadPoolExecutor:
    """Return the process's pool of threads that read what a cache lacks.

    Apart from ``io_pool``, whose threads may wait for these.
    """
    return pool("fluxon_gop-origin")


def pool(name: str) -> ThreadPoolExecutor:
    """Return the process's pool of this name, for reads of one kind that wait for no others of their kind."""
    return _pools.get(name) or _pool(name, MAX_REQUESTS_IN_FLIGHT)


def decode_pool() -> ThreadPoolExecutor:
    """Return the process's pool of decoding threads; the bound is read at its first use."""
    return _pools.get("fluxon_gop-decode") or _pool("fluxon_gop-decode", _bound() or usable_cores())


def decode_limit(num_threads: int) -> int:
    """Return how many calls of one batch may decode at once, where each reader may use ``num_threads``."""
    bound = _bound()
    if bound:
        return bound
    return num_threads if multiprocessing.parent_process() is not None else usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bound() -> int | None:
    text = os.environ.get(DECODE_THREADS_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        message = f"{DECODE_THREADS_VARIABLE} is {text!r}: want a positive number"
        raise InvalidRequestError(message)
    return int(text)


def _pool(name: str, size: int) -> ThreadPoolExecutor:
    with _lock:
        if name not in _pools:
            _pools[name] = ThreadPoolExecutor(size, thread_name_prefix=name)
        return _pools[name]


def _forget() -> None:
    """In a forked child: the parent's threads are not here, and its lock may be held for ever."""
    global _pools, _lock
    _pools, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget)
