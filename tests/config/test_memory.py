"""A MemoryShares's parts lie within max_bytes, and its advice is enough, and little more."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import MemoryShares, StreamConfig, WorkerConfig

SIZES = st.integers(1, 2**45)
PLANS = st.builds(MemoryShares, SIZES, st.integers(1, 64), st.booleans())


@given(plan=PLANS)
def test_the_parts_of_all_processes_lie_within_max_bytes(plan: MemoryShares) -> None:
    own = plan.decoders_bytes + plan.clips_bytes + 2 * plan.indexes_bytes + plan.shared_rows_bytes
    common = plan.pool_bytes + plan.common_small_bytes if plan.reads_as_one else 0
    least_of_each = 2  # a decoder and a clip have a byte each, however little there is
    assert own * plan.workers + common <= plan.max_bytes + plan.workers * least_of_each


@given(plan=PLANS, clips_bytes=SIZES)
def test_advice_that_is_followed_is_enough(plan: MemoryShares, clips_bytes: int) -> None:
    for_clips = replace(plan, max_bytes=plan.max_bytes_for_clips(clips_bytes))
    assert clips_bytes <= for_clips.clips_bytes <= clips_bytes + 8
    for_pool = replace(plan, max_bytes=plan.max_bytes_for_pool(clips_bytes))
    assert clips_bytes <= for_pool.pool_bytes <= clips_bytes + 8


@given(max_bytes=SIZES, workers=st.integers(1, 8), readers_name=st.sampled_from([None, "x"]))
def test_a_loader_worker_says_what_the_rank_has(max_bytes: int, workers: int, readers_name: str | None) -> None:
    rank = StreamConfig(max_bytes=max_bytes, decode_threads=8)
    plan = MemoryShares.of(WorkerConfig.of(rank, workers, readers_name))
    assert plan.max_bytes == max_bytes == MemoryShares.of(rank).max_bytes
    assert plan.pool_bytes == MemoryShares.of(rank).pool_bytes
