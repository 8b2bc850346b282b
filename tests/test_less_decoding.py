"""What is decoded, and what is not: spare pictures, decoders that go on, spans side by side, spans too long to hold."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import threading
from itertools import pairwise

import av
import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop import threads
from fluxon_gop.encode import Recipe
from fluxon_gop.plan import divide, find_spans
from fluxon_gop.sparse_buffer import SparseBuffer
from tests.media import RECIPES, X264, full_decode, make

PYRAMID = "keyint=60:min-keyint=60:scenecut=0:bframes=3:b-adapt=0:b-pyramid=normal"
MADE = {
    "pyramid": Recipe(options={"preset": "veryfast", "x264-params": PYRAMID}),
    "hevc pyramid": Recipe(
        codec="libx265",
        tag="hvc1",
        options={
            "preset": "ultrafast",
            "x265-params": f"{PYRAMID}:log-level=none".replace("=normal", "=1"),
        },
    ),
    "hevc layers": Recipe(
        codec="libx265",
        tag="hvc1",
        options={
            "preset": "ultrafast",
            "x265-params": "keyint=60:min-keyint=60:scenecut=0:bframes=3:b-adapt=0:temporal-layers=3:log-level=none",
        },
    ),
    "forward": Recipe(options={**X264, "bf": "0", "g": "30"}),
    "hidden SEI": Recipe(
        options={
            "preset": "ultrafast",
            "x264-params": "keyint=60:scenecut=0:bframes=2:b-adapt=0:nal-hrd=vbr:vbv-maxrate=900:vbv-bufsize=900",
        }
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    return {name: make(folder / f"{n}.mp4", recipe) for n, (name, recipe) in enumerate(MADE.items())}


@pytest.mark.parametrize("name", ["pyramid", "hevc pyramid", "hevc layers", "hidden SEI"])
def test_spare_pictures_are_not_sent_and_every_picture_is_exact(made, name):
    """Each frame read alone is FFmpeg's, and deep in a GOP a quarter of the packets or more is left out."""
    truth = full_decode(made[name])
    index = fg.build_index(made[name])
    for frame in range(len(truth)):
        with fg.VideoReader.open(made[name], index=index) as reader:
            assert np.array_equal(truth[frame], reader.read_frames_numpy([frame])[0])
            stats = reader.stats()
        (span,) = find_spans(index, np.array([frame]))
        length = span.last + 1 - span.entry
        assert stats.packets_sent <= length
        if length > 40:
            assert stats.packets_sent <= 0.75 * length


def test_a_picture_that_a_higher_layer_needs_is_sent(made):
    """Where layers stand over one another only the highest one is spare: the layers below are all sent."""
    index = fg.build_index(made["hevc layers"])
    with fg.VideoReader.open(made["hevc layers"], index=index) as reader:
        reader.read_frames_numpy([57])
        sent = reader.stats().packets_sent
    (span,) = find_spans(index, np.array([57]))
    assert sent >= 0.4 * (span.last + 1 - span.entry)


@pytest.mark.parametrize("name", ["forward", "av1", "allintra"])
def test_a_reader_goes_on_in_the_same_gop(made, media, name):
    """Frames in order, one a call: each sample is fetched and sent once, where nothing has to be drained."""
    path = (made | media)[name]
    truth = full_decode(path)
    index = fg.build_index(path)
    with fg.VideoReader.open(path, index=index) as reader:
        for frame in range(len(truth)):
            assert np.array_equal(truth[frame], reader.read_frames_numpy([frame])[0])
        stats = reader.stats()
    assert len(truth) == stats.packets_sent
    assert int(index.sample_size.sum()) == stats.bytes[fg.WaveKind.MEDIA]


@pytest.mark.parametrize("name", [*MADE, *RECIPES])
def test_any_sequence_of_reads_is_exact(made, media, name):
    """Reads that go on, go back, repeat and jump, on one reader, all give FFmpeg's frames, on any threads."""
    path = (made | media)[name]
    truth = full_decode(path)
    rng = random.Random(name)
    size = path.stat().st_size
    for count, limit in ((1, 1 << 30), (2, 1 << 30), (3, 1 << 30), (1, size // 4), (2, size // 8)):
        with fg.VideoReader(path, num_threads=count, apply_rotation=False, max_bytes=limit) as reader:
            at = 0
            for _ in range(25):
                at = min(at + rng.choice([1, 1, 2, 7]), 59) if rng.random() < 0.7 else rng.randrange(60)
                wanted = [at, *(min(at + rng.randrange(9), 59) for _ in range(rng.choice([0, 0, 3])))]
                if rng.random() < 0.2:
                    wanted += [rng.randrange(60) for _ in range(3)]
                assert np.array_equal(truth[wanted], reader.read_frames_numpy(wanted)), wanted


def test_spans_are_cut_at_clean_entry_points_only(media):
    """Pieces for two threads cover the same targets, overlap nowhere, and start at proven samples."""
    for name in ("bframes", "hevc", "opengop", "longgop"):
        index = fg.build_index(media[name])
        frames = np.arange(60)
        spans = find_spans(index, frames)
        pieces = divide(index, spans, 2)
        assert sorted(t for s in spans for t in s.targets) == [t for piece in pieces for t in piece.targets]
        starts, clean = index.starts
        assert {piece.entry for piece in pieces} <= set(starts[clean].tolist())
        assert all(a.last < b.entry for a, b in pairwise(pieces))
        assert {"bframes": 2, "hevc": 1, "opengop": 1, "longgop": 1}[name] <= len(pieces)


def test_two_threads_decode_side_by_side(media, monkeypatch):
    """With two threads two pieces are under way at once; with one, never."""
    monkeypatch.setenv(threads.DECODE_THREADS_VARIABLE, "2")
    for count in (1, 2):
        most = _most_at_once(media["bframes"], count, monkeypatch)
        assert count == most


def _most_at_once(path, count, monkeypatch):
    """Return how many spans were decoded at once; each waits a moment for company."""
    from fluxon_gop import decoders

    running, most, both = set(), [0], threading.Barrier(2)
    real = decoders.decode_span

    def watched(*args):
        running.add(threading.get_ident())
        most[0] = max(most[0], len(running))
        try:
            both.wait(0.3)
        except threading.BrokenBarrierError:
            both.reset()
        most[0] = max(most[0], len(running))
        yield from real(*args)
        running.discard(threading.get_ident())

    with monkeypatch.context() as patch:
        patch.setattr(decoders, "decode_span", watched)
        with fg.VideoReader.open(path, num_threads=count) as reader:
            reader.read_frames_numpy(range(60))
    return most[0]


def _in_a_worker(path, sent):
    """Read a batch of four readers and tell which threads this process has, and what was read."""
    requests = [fg.VideoReadRequest(path, [5, 40], height=h, width=h) for h in (32, 40, 48, 56)]
    with fg.VideoReaderPool() as pool:
        pool.read_many(requests)
    sent.put([thread.name for thread in threading.enumerate() if "decode" in thread.name])


def test_a_worker_process_decodes_on_its_own_thread(media):
    """In a child process, beside other workers, num_threads=1 means one: no pool of decoding threads is made."""
    context = multiprocessing.get_context("spawn")
    sent = context.Queue()
    worker = context.Process(target=_in_a_worker, args=(str(media["bframes"]), sent))
    worker.start()
    assert [] == sent.get(timeout=60)
    worker.join()


def test_the_bound_on_decoding_threads_is_the_processs(monkeypatch):
    """The variable bounds it; without it, the main process uses its cores, whatever a reader asks for."""
    monkeypatch.setenv(threads.DECODE_THREADS_VARIABLE, "3")
    assert 3 == threads.decode_limit(1) == threads.decode_limit(16)
    monkeypatch.delenv(threads.DECODE_THREADS_VARIABLE)
    assert len(os.sched_getaffinity(0)) == threads.decode_limit(1)


@pytest.mark.parametrize("name", ["longgop", "hevc pyramid", "pyramid"])
def test_a_span_too_long_to_hold_comes_in_runs(made, media, name):
    """One key frame, a far target, a small budget: exact, no wave above the budget, one after the other."""
    path = (made | media)[name]
    truth = full_decode(path)
    index = fg.build_index(path)
    limit = int(index.sample_size.sum()) // 5
    source = fg.TracedSource(fg.LocalSource(path))
    with fg.VideoReaderPool(index=index, max_batch_bytes=limit) as pool:
        (result,) = pool.read_many([fg.VideoReadRequest(source, [59, 3])])
        (again,) = pool.read_many([fg.VideoReadRequest(source, [20])])
    assert np.array_equal(truth[[59, 3]], result.array)
    assert np.array_equal(truth[[20]], again.array)
    assert 5 <= result.stats.waves[fg.WaveKind.MEDIA] <= 8
    assert max(request.stop - request.start for request in source.trace.requests) <= limit
    assert result.stats.unplanned_requests == 0


def test_a_long_span_with_a_refuted_claim_is_extended_in_runs(media, monkeypatch):
    """The claim of a key sample is checked on its own bytes; the longer span comes in runs as well."""
    from dataclasses import replace

    path = media["longgop"]
    index = fg.build_index(path)
    lying = replace(index, key_samples=np.array([0, 30]), verdicts=np.zeros(2, np.uint8))
    limit = int(index.sample_size.sum()) // 6
    with fg.VideoReaderPool(index=lying, max_batch_bytes=limit) as pool:
        (result,) = pool.read_many([fg.VideoReadRequest(path, [59])])
    assert np.array_equal(full_decode(path)[[59]], result.array)
    assert 1 == result.stats.refuted_entry_points


def test_parameter_sets_in_band_do_not_outlive_their_gop(tmp_path):
    """An avc1 file whose second half carries sets of its own: whatever was read before, every frame is FFmpeg's."""
    path = tmp_path / "two.mp4"
    _two_halves(path)
    truth = full_decode(path)
    index = fg.build_index(path)
    for choice in (None, "container"):
        with fg.VideoReader.open(path, index=index, path=choice) as reader:
            for frame in (5, 30, 5, 15, 35, 2, 30):
                assert np.array_equal(truth[frame], reader.read_frames_numpy([frame])[0]), (choice, frame)


def _two_halves(path):
    """Write 24 frames whose sets stand in avcC, and 24 of another quality whose sets stand in their key samples."""
    import av

    from fluxon_gop.bitstream import avc_record

    halves = [
        make(path.with_name(f"{crf}.mp4"), Recipe(options={**X264, "crf": crf}), 24) for crf in ("20", "32")
    ]
    packets, sets = [], []
    for half in halves:
        with av.open(str(half)) as given:
            stream = given.streams.video[0]
            nals = avc_record(stream.codec_context.extradata).nals
            sets.append(b"".join(len(nal).to_bytes(4) + nal for nal in nals))
            demuxed = [packet for packet in given.demux(stream) if packet.dts is not None]
            packets.append([(bytes(p), p.pts, p.dts, p.duration, p.is_keyframe) for p in demuxed])
    assert sets[0] != sets[1]
    length = sum(packet[3] for packet in packets[0])
    with av.open(str(halves[0])) as given, av.open(str(path), "w") as out:
        stream = given.streams.video[0]
        copy = out.add_stream_from_template(stream)
        for turn, half in enumerate(packets):
            for data, pts, dts, duration, key in half:
                packet = av.Packet((sets[1] if turn and key else b"") + data)
                packet.pts, packet.dts, packet.duration = pts + turn * length, dts + turn * length, duration
                packet.time_base, packet.stream, packet.is_keyframe = stream.time_base, copy, key
                out.mux(packet)


def test_what_was_fetched_is_let_go_of(media):
    """A reader that waits for its next batch holds decoders, and no fetched bytes."""
    source = fg.MemorySource(media["bframes"].read_bytes(), "held")
    with fg.VideoReaderPool() as pool:
        pool.read_many([fg.VideoReadRequest(source, [3, 40])])
        gc.collect()
        buffers = [thing for thing in gc.get_objects() if type(thing) is SparseBuffer]
        assert [] == [buffer for buffer in buffers if buffer.source is source and buffer.nbytes]


def test_a_senseless_bound_is_refused(monkeypatch, media):
    """A variable that is no positive number is named in the error."""
    for text in ("two", "-1", "0", ""):
        monkeypatch.setenv(threads.DECODE_THREADS_VARIABLE, text)
        with pytest.raises(fg.InvalidRequestError, match=threads.DECODE_THREADS_VARIABLE):
            threads.decode_limit(1)


@pytest.mark.parametrize("name", ["mpeg4", "bframes"])
def test_a_read_of_nothing_disturbs_nothing(media, name):
    """No frames asked for in the midst of reads: the next ones, and the count, are right."""
    truth = full_decode(media[name])
    with fg.VideoReader.open(media[name]) as reader:
        for wanted in ([], [3], [], [9, 4], [], [59]):
            assert np.array_equal(truth[wanted], reader.read_frames_numpy(wanted))
        assert len(truth) == reader.num_frames


@pytest.mark.parametrize("count", [1, 3])
def test_damage_that_ffmpeg_makes_up_for_is_made_up_for_as_ffmpeg_does(made, tmp_path, count):
    """Where a bit is wrong and the full decode shows a made-up picture, each frame read alone is that picture."""
    index = fg.build_index(made["pyramid"])
    rng = random.Random(3)
    seen = 0
    for turn in range(12):
        data = bytearray(made["pyramid"].read_bytes())
        sample = rng.choice([n for n in range(8, 60) if int(index.sample_size[n]) > 60])
        data[int(index.sample_offset[sample]) + rng.randrange(20, 50)] ^= 1 << rng.randrange(8)
        path = tmp_path / f"{turn}.mp4"
        path.write_bytes(data)
        try:
            truth = full_decode(path)
        except av.error.FFmpegError:
            continue
        if len(truth) < 60:
            continue
        seen += 1
        for frame in rng.sample(range(60), 12):
            with fg.VideoReader.open(path, num_threads=count) as reader:
                try:
                    picture = reader.read_frames_numpy([frame])[0]
                except fg.DecodeError:
                    continue
                assert np.array_equal(truth[frame], picture), (turn, sample, frame)
    assert seen >= 4
