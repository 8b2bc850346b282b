"""Frames to spans to ranges: what is planned is what is needed, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluxon_gop as fg
from fluxon_gop.plan import (
    GAP_BYTES,
    MAX_GAP_BYTES,
    MAX_REQUEST_BYTES,
    Path,
    VideoPlan,
    coalesced,
    gap_for,
    parts,
    plan_container,
    plan_packets,
    sample_range,
)
from fluxon_gop.ranges import ByteRange, as_array, as_ranges, merge, split, subtract


@pytest.fixture
def index(media) -> fg.VideoIndex:
    """60 frames, GOPs of 12, B-frames."""
    return fg.build_index(media["bframes"])


def _plan(index, frames):
    return plan_packets(index, np.array(frames, np.int64))


def test_no_frames_need_no_bytes(index):
    """An empty request has no spans and no ranges."""
    plan = _plan(index, [])
    assert ((), (), 0, 1.0) == (plan.spans, plan.ranges, plan.wanted_bytes, plan.over_read)


def test_a_span_ends_at_the_last_needed_sample(index):
    """Not at the GOP's end: what lies behind the target in decode order is not fetched."""
    (span,) = _plan(index, [14]).spans
    assert (12, index.frame_sample[14], (index.frame_sample[14],)) == span[:3]
    assert index.frame_sample[14] < 23


def test_frames_of_one_gop_share_a_span(index):
    """Two targets behind one entry point are one span up to the later one."""
    (span,) = _plan(index, [13, 20]).spans
    assert 12 == span.entry
    assert 2 == len(span.targets)


def test_far_gops_are_spans_and_ranges_of_their_own(index):
    """What lies between two far clips is not fetched; here it is less than a request is worth."""
    plan = _plan(index, [1, 50])
    assert [0, 48] == [span.entry for span in plan.spans]
    far = replace(index, sample_offset=index.sample_offset * 1000)
    assert len(_plan(far, [1, 50]).ranges) > 1


def test_spans_that_run_into_each_other_are_one(index):
    """A whole GOP and the next one's start are decoded in one go."""
    assert 1 == len(_plan(index, range(30)).spans)


def test_a_hole_up_to_the_gap_is_read_through_and_no_more(index):
    """Ranges are joined across GAP_BYTES, not across one byte more."""
    for hole, ranges in ((GAP_BYTES, 1), (GAP_BYTES + 1, 2)):
        offset = index.sample_offset.copy()
        offset[30:] += hole
        assert ranges == len(_plan(replace(index, sample_offset=offset), range(24, 36)).ranges)


def test_a_large_range_is_split_into_near_equal_requests(index):
    """No request is larger than MAX_REQUEST_BYTES, and none is a small rest."""
    big = replace(
        index,
        sample_size=index.sample_size + 3_000_000,
        sample_offset=index.sample_offset + np.arange(60) * 3_000_000,
    )
    sizes = [r.size for r in _plan(big, range(12)).ranges]
    assert max(sizes) <= MAX_REQUEST_BYTES
    assert max(sizes) - min(sizes) <= 1


def test_a_refused_key_is_no_entry_point(index):
    """Decoding starts at the proven one before, in the worst case at the stream's start."""
    refused = index.with_verdicts(np.array([12, 24]), np.full(2, fg.Verdict.REFUSED, np.uint8))
    assert [0] == [span.entry for span in _plan(refused, [25]).spans]
    assert [36] == [span.entry for span in _plan(refused, [37]).spans]


def test_a_leading_frame_starts_at_the_entry_before(media):
    """A picture shown before its CRA needs the GOP before; one shown after does not."""
    index = fg.build_index(media["hevc"])
    keys = index.key_samples.tolist()
    assert fg.Verdict.PROVEN_TRAILING in index.verdicts.tolist()
    key = next(k for k, v in zip(keys, index.verdicts, strict=True) if v == fg.Verdict.PROVEN_TRAILING)
    leading = [
        int(index.sample_frame[s])
        for s in range(key + 1, key + 5)
        if index.sample_pts[s] < index.sample_pts[key]
    ]
    assert leading
    assert keys[keys.index(key) - 1] == _plan(index, leading[:1]).spans[0].entry
    assert key == _plan(index, [int(index.sample_frame[key]) + 1]).spans[0].entry


def test_unchecked_claims_are_named_and_the_first_sample_is_always_among_them(media):
    """A plan on an unchecked index says what to check, and brings the bytes for it."""
    index = fg.build_index(media["bframes"], check="none")
    plan = _plan(index, [30])
    assert (0, 24) == plan.unchecked
    first = sample_range(index, 0)
    assert any(r.start <= first.start < r.stop for r in plan.ranges)


def test_parts_hold_the_byte_limit_where_spans_allow_it(index):
    """A plan beyond the limit is cut between spans; all targets stay."""
    far = replace(index, sample_offset=index.sample_offset * 1000)
    plan = _plan(far, [1, 20, 50])
    limit = plan.wanted_bytes // 2
    cut = parts(far, plan, limit)
    assert len(cut) > 1
    assert [s for p in plan.spans for s in p.targets] == [
        t for part in cut for s in part.spans for t in s.targets
    ]
    assert [plan] == parts(far, plan, plan.nbytes)


def test_the_container_plan_brings_head_movie_box_and_samples(index):
    """FFmpeg's demuxer needs the file's head and its movie box beside the samples."""
    plan = plan_container(index, np.array([30]), "asked for")
    assert (Path.CONTAINER, "asked for", False) == (plan.path, plan.reason, plan.counted)
    needed = [ByteRange(0, 8), index.moov_range, sample_range(index, 24)]
    for want in needed:
        assert any(r.start <= want.start and want.stop <= r.stop for r in plan.ranges)


def test_a_counted_container_plan_starts_at_the_stream_start(index):
    """Where frames are counted everything up to the last needed one is planned."""
    plan = plan_container(replace(index, container_reason="why"), np.array([30]), "why")
    assert plan.counted
    assert plan.wanted_bytes >= int(index.sample_size[:31].sum())


@given(st.floats(0.0001, 1), st.floats(1e5, 1e10), st.integers(1, 256), st.integers(1, 1000))
def test_a_hole_is_read_through_where_its_bytes_cost_less_than_a_request(
    latency, bandwidth, at_once, requests
):
    """Between 32 KiB and 1 MiB: more on faster links, and more where requests have to take turns."""
    gap = gap_for(latency, bandwidth, at_once, requests)
    assert GAP_BYTES <= gap <= MAX_GAP_BYTES
    assert gap <= gap_for(latency, 2 * bandwidth, at_once, requests)
    assert gap_for(latency, bandwidth, at_once, at_once) <= gap_for(
        latency, bandwidth, at_once, at_once + 1
    )


@given(
    st.lists(st.tuples(st.integers(0, 1 << 24), st.integers(1, 1 << 20)), min_size=1, max_size=30),
    st.floats(1e6, 1e10),
)
def test_a_coalesced_plan_covers_the_same_bytes_in_no_more_requests(pieces, bandwidth):
    """Whatever a request costs, each byte of the plan is still fetched, once, in requests of up to 8 MiB."""
    ranges = merge(as_array([ByteRange(start, start + size) for start, size in pieces]))
    plan = VideoPlan(Path.PACKET, (), as_ranges(split(ranges, MAX_REQUEST_BYTES)), 0)
    after = coalesced(plan, (0.05, bandwidth, 64))
    assert 0 == len(subtract(ranges, merge(as_array(after.ranges))))
    assert all(one.size <= MAX_REQUEST_BYTES for one in after.ranges)
    assert all(a.stop <= b.start for a, b in pairwise(after.ranges))
    assert plan is coalesced(plan, None)
