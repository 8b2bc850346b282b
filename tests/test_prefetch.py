"""Waves and the sparse buffer: jobs side by side, bounds held, nothing left running."""

from __future__ import annotations

import threading
import time

import pytest

import fluxon_gop as fg
from fluxon_gop.budget import Budget
from fluxon_gop.jobs import Compute, Wave, run_one
from fluxon_gop.prefetch import Crew
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sparse_buffer import MAX_HOLE_BYTES, SparseBuffer, SparseFile
from fluxon_gop.stats import ReadStats, WaveKind

DATA = bytes(range(256)) * 64


class SlowSource(fg.MemorySource):
    """A source whose reads take a while, and count how many run at once."""

    def __init__(self, data=DATA, seconds=0.02, fail=()):
        super().__init__(data, name="slow")
        self.seconds, self.fail = seconds, set(fail)
        self.running = self.most = self.reads = 0
        self.lock = threading.Lock()

    def read(self, start, stop):
        with self.lock:
            self.running += 1
            self.reads += 1
            self.most = max(self.most, self.running)
        try:
            time.sleep(self.seconds)
            if start in self.fail:
                raise fg.SourceError(f"no byte {start}", source=self.name)
            return super().read(start, stop)
        finally:
            with self.lock:
                self.running -= 1


def _job(source, *waves, adds=False, compute=None):
    """Fetch the waves (lists of (start, stop)) one after another and return all bytes."""
    got = []
    for ranges in waves:
        data = yield Wave(WaveKind.MEDIA, source, tuple(ByteRange(*r) for r in ranges), adds=adds)
        got += [bytes(d) for d in data]
    if compute is not None:
        yield Compute((compute,))
    return got


def _crew(*jobs, max_bytes=None):
    stats = [ReadStats() for _ in jobs]
    return {o.number: o for o in Crew(list(zip(jobs, stats, strict=True)), Budget(max_bytes))}, stats


def test_all_jobs_reads_of_a_wave_are_in_flight_together():
    """Ten jobs of two ranges each: twenty reads at once, depth 1."""
    # Long enough that a busy machine has started all threads before the first read ends.
    source = SlowSource(seconds=1.0)
    outcomes, stats = _crew(*(_job(source, [(n, n + 5), (n + 50, n + 60)]) for n in range(10)))
    assert [[DATA[n : n + 5], DATA[n + 50 : n + 60]] for n in range(10)] == [
        outcomes[n].value for n in range(10)
    ]
    assert 20 == source.most
    assert {1} == {one.depth for one in stats}
    assert (2, 15, 1) == (stats[0].requests["media"], stats[0].bytes["media"], stats[0].waves["media"])


def test_a_job_goes_on_when_its_own_ranges_are_in():
    """A fast source's job ends while a slow one's read is under way."""
    slow, fast = SlowSource(seconds=0.3), SlowSource(seconds=0)
    order = [
        outcome.number
        for outcome in Crew(
            [(_job(slow, [(0, 5)]), ReadStats()), (_job(fast, [(0, 5)], [(5, 9)]), ReadStats())]
        )
    ]
    assert [1, 0] == order


def test_reads_are_sent_before_other_jobs_compute():
    """A job's second wave is sent before another job's long work on the processor begins."""
    source, begun = SlowSource(seconds=0.02), []
    _crew(
        _job(source, [(0, 1)], compute=lambda: begun.append(source.reads)),
        _job(source, [(0, 1)], compute=lambda: begun.append(source.reads)),
        _job(source, [(0, 1)], compute=lambda: begun.append(source.reads)),
    )
    assert [3] * 3 == begun


def test_the_byte_budget_holds_waves_back():
    """With room for one job's bytes at a time no two are in flight, and the depth says so."""
    source = SlowSource()
    outcomes, stats = _crew(*(_job(source, [(0, 100)]) for _ in range(4)), max_bytes=150)
    assert [None] * 4 == [outcome.error for outcome in outcomes.values()]
    assert 1 == source.most
    assert 4 == max(one.depth for one in stats)


def test_jobs_that_hold_bytes_and_wait_do_not_block_each_other_for_ever():
    """Two jobs that both want more than is left go on one after the other."""
    source = SlowSource()
    outcomes, _ = _crew(
        *(_job(source, [(0, 100)], [(100, 200)], adds=True) for _ in range(2)), max_bytes=200
    )
    assert [[DATA[:100], DATA[100:200]]] * 2 == [outcome.value for outcome in outcomes.values()]


def test_an_error_is_its_own_jobs_only():
    """One failing read ends its job with that error; the others come through."""
    source = SlowSource(fail={7})
    outcomes, _ = _crew(_job(source, [(0, 5)]), _job(source, [(7, 9), (0, 2)]), _job(source, [(1, 5)]))
    assert "no byte 7" in str(outcomes[1].error)
    assert [None, None] == [outcomes[0].error, outcomes[2].error]


def test_leaving_the_loop_leaves_no_read_running():
    """Break, an exception or a closed pool: what has begun is awaited, what has not is cancelled."""
    source = SlowSource(seconds=0.05)
    jobs = [(_job(source, [(n, n + 1) for n in range(60)]), ReadStats()) for _ in range(4)]
    jobs.append((_job(SlowSource(seconds=0), [(0, 1)]), ReadStats()))
    for _ in Crew(jobs):
        break
    assert 0 == source.running
    reads = source.reads
    time.sleep(0.1)
    assert reads == source.reads < 240


def test_stop_ends_a_loop_in_another_thread():
    """stop() makes the running loop raise ClosedError."""
    crew = Crew([(_job(SlowSource(seconds=0.2), [(0, 1), (1, 2)]), ReadStats())])
    threading.Timer(0.05, crew.stop).start()
    with pytest.raises(fg.ClosedError, match="closed while"):
        list(crew)


def test_run_one_returns_or_raises():
    """A single job's value or error comes straight out."""
    assert [DATA[3:5]] == run_one(_job(SlowSource(), [(3, 5)]), ReadStats())
    with pytest.raises(fg.SourceError):
        run_one(_job(SlowSource(fail={3}), [(3, 5)]), ReadStats())


# --------------------------------------------------------------------------- the sparse buffer


@pytest.fixture
def buffer():
    return SparseBuffer(fg.MemorySource(DATA, name="data"), ReadStats())


def test_a_read_inside_a_segment_is_a_view(buffer):
    """What was fetched comes back without a read and without a copy."""
    held = memoryview(DATA)[100:200]
    buffer.insert(100, held)
    assert buffer.view(110, 150).obj is held.obj
    assert 0 == buffer.stats.unplanned_requests


def test_a_read_across_segments_is_joined(buffer):
    """Touching segments read as one."""
    buffer.insert(100, DATA[100:150])
    buffer.insert(150, DATA[150:200])
    assert DATA[120:180] == bytes(buffer.view(120, 180))
    assert 0 == buffer.stats.unplanned_requests


def test_a_hole_is_read_from_the_source_and_counted(buffer):
    """Only the missing bytes are read."""
    buffer.insert(0, DATA[:50])
    buffer.insert(60, DATA[60:100])
    assert DATA[40:70] == bytes(buffer.view(40, 70))
    assert (1, 10) == (buffer.stats.unplanned_requests, buffer.stats.unplanned_bytes)


def test_overlapping_inserts_keep_every_byte_once(buffer):
    """Whatever the order, segments stay disjoint and right."""
    for start, stop in ((50, 100), (20, 60), (0, 200), (150, 300)):
        buffer.insert(start, DATA[start:stop])
    assert 300 == buffer.nbytes
    assert DATA[:300] == bytes(buffer.view(0, 300))
    edges = [edge for segment in buffer.segments for edge in segment]
    assert sorted(edges) == edges


def test_what_unplanned_reads_brought_is_bounded():
    """A file read through on demand does not pile up in memory."""
    size = MAX_HOLE_BYTES * 2
    file = SparseFile(size)
    file.buffer = SparseBuffer(fg.MemorySource(bytes(size)), ReadStats())
    while file.read(1 << 20):
        pass
    assert file.buffer.nbytes <= MAX_HOLE_BYTES + (4 << 20)


def test_the_file_reads_short_at_a_segments_edge(buffer):
    """As PyAV allows: up to the edge without touching the source, then on."""
    file = SparseFile(len(DATA))
    file.buffer = buffer
    buffer.insert(0, DATA[:100])
    assert DATA[:100] == file.read(500)
    assert 0 == buffer.stats.unplanned_requests
    assert DATA[100:600] == file.read(500)
    assert 1 == buffer.stats.unplanned_requests
    assert (len(DATA), True) == (file.seek(0, 2), file.seekable())
    assert b"" == file.read(5)
    assert (10, 10) == (file.seek(10), file.tell())
    with pytest.raises(fg.InvalidRequestError, match="before the start"):
        file.seek(-1)
