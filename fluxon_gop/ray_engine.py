"""Shards of a build as tasks of a Ray cluster. Needs ray (``pip install 'fluxon-gop[ray]'``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fluxon_gop.build_shards import Shard, ShardDone, build_shard
from fluxon_gop.errors import InvalidRequestError


class RayEngine:
    """One task a shard; twice as many under way as the cluster has processors. Rows come back to the driver, which commits."""

    def __init__(self) -> None:
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
        if not ray.is_initialized():
            ray.init(logging_level="warning", log_to_driver=False, include_dashboard=False)

    def run(self, shards: Iterable[Shard]) -> Iterator[ShardDone]:
        """Yield what comes of the shards, as the tasks end; a task whose worker died is run again by Ray."""
        ray = self._ray
        task = ray.remote(build_shard)
        limit = max(2 * int(ray.cluster_resources().get("CPU", 1)), 2)
        pending = iter(shards)
        running: list[Any] = []
        try:
            while True:
                while len(running) < limit and (shard := next(pending, None)) is not None:
                    running.append(task.remote(shard))
                if not running:
                    return
                done, running = ray.wait(running, num_returns=1)
                for one in done:
                    yield ray.get(one)
        finally:
            for one in running:
                ray.cancel(one)
