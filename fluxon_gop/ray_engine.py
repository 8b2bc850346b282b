"""Shards of a build as tasks of a Ray cluster. Needs ray (``pip install 'fluxon-gop[ray]'``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute

from fluxon_gop.build_shards import Shard, ShardDone, build_shard
from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.index_rows import keys_of
from fluxon_gop.index_table import IndexTable
from fluxon_gop.lance_rows import FragmentPlace, write_fragments


class RayEngine:
    """One task a shard; twice as many under way as the cluster has processors.

    The workers write new rows of a Lance table as its fragments, and the driver commits each finished shard; rows that
    replace others, and those of an ``.arrow`` table, come back to the driver.
    """

    shard = 512

    def __init__(self, table: IndexTable) -> None:
        """Join the cluster that the environment names (``RAY_ADDRESS``), or start one on this machine.

        Raises:
            InvalidRequestError: ray is not installed.
        """
        try:
            import ray
        except ImportError:
            text = "engine 'ray' needs ray: pip install 'fluxon-gop[ray]'"
            raise InvalidRequestError(text) from None
        self._ray: Any = ray
        self._table = table
        if not ray.is_initialized():
            ray.init(logging_level=30, log_to_driver=False, include_dashboard=False)

    def run(self, shards: Iterable[Shard]) -> Iterator[ShardDone]:
        """Yield what comes of the shards, as the tasks end; a task whose worker died is run again by Ray."""
        ray = self._ray
        task = ray.remote(_build)
        place = self._table.fragment_place()
        limit = max(2 * int(ray.cluster_resources().get("CPU", 1)), 2)
        pending = iter(shards)
        running: list[Any] = []
        try:
            while True:
                while len(running) < limit and (shard := next(pending, None)) is not None:
                    running.append(task.remote(shard, place))
                if not running:
                    return
                done, running = ray.wait(running, num_returns=1)
                for one in done:
                    yield ray.get(one)
        finally:
            for one in running:
                ray.cancel(one)


def _build(shard: Shard, place: FragmentPlace | None) -> ShardDone:
    """In a worker: index a shard, and write its new rows where they belong."""
    done = build_shard(shard)
    if place is not None and done.rows.num_rows:
        old = pa.array([key in shard.there for key in keys_of(done.rows)])
        done.fragments = write_fragments(done.rows.filter(pa.compute.invert(old)), place)
        done.rows = done.rows.filter(old)
    return done
