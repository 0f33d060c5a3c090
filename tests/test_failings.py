"""What other streaming readers of LeRobot datasets do wrong, and the tests that show that asyncfetch doesn't.

Numbered as in section 5 of the project's notes on the format. The failing is told as others have it.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent


class Failing(NamedTuple):
    what: str
    tests: tuple[str, ...]
    """Of this repository: file::test."""


FAILINGS = {
    1: Failing(
        "frames of a second video file are looked for by a clock of the whole dataset",
        (
            "end_to_end/test_every_frame.py::test_the_async_iterator",
            "lerobot/test_dataset_pixels.py::test_recorded_dataset",
        ),
    ),
    2: Failing(
        "a video that is too short repeats its last frame",
        (
            "lerobot/test_dataset_irregular.py::test_short_video_lacks_just_its_last_frames",
            "lerobot/test_dataset_irregular.py::test_a_window_over_missing_frames_is_refused",
            "decode/test_decoder.py::test_a_neighbour_is_never_given_for_a_frame",
        ),
    ),
    3: Failing(
        "padding is of the wrong frame, or silent beyond a fixed history",
        (
            "lerobot/test_samples.py::test_windows_repeat_the_ends_of_the_episode",
            "lerobot/test_samples_windows.py::test_a_place_outside_repeats_the_nearest_end_and_is_padding",
            "lerobot/test_samples.py::test_long_window_is_one_call_a_camera_and_one_decode_a_frame",
        ),
    ),
    4: Failing(
        "episodes= and shuffle=False are taken and ignored",
        (
            "end_to_end/test_every_frame.py::test_the_async_iterator",
            "end_to_end/test_every_frame.py::test_chosen_episodes_come_in_the_chosen_order",
            "end_to_end/test_every_frame.py::test_chosen_episodes_shuffled",
        ),
    ),
    5: Failing(
        "videos come of another revision than the tables, or are asked for without the token",
        (
            "fetch/test_hub.py::test_a_revision_stays_what_it_was",
            "fetch/test_hub.py::test_the_token_is_the_hubs_alone",
            "end_to_end/test_stores.py::test_videos_and_tables_come_of_the_revision_that_was_opened",
        ),
    ),
    6: Failing(
        "an error of a frame ends a shard silently, or one failed fetch poisons the episode",
        (
            "end_to_end/test_broken.py::test_a_broken_file_is_named_by_a_loaders_worker",
            "stream/test_passes.py::test_error_comes_behind_earlier_samples_and_ends_the_pass",
            "lerobot/test_episode_cache.py::test_a_failed_prefetch_is_not_remembered",
        ),
    ),
    7: Failing(
        "a part of moov is read: no ctts, no elst, no moov at the tail, or that after ever longer requests",
        (
            "media/test_index.py::test_the_index_describes_the_track",
            "media/test_clip.py::test_pyav_shows_the_asked_frames_at_the_planned_times",
            "lerobot/test_episode_cache_clips.py::test_an_index_at_the_tail_costs_one_request_more",
            "media/test_index.py::test_reads_to_find_the_index_are_bounded",
        ),
    ),
    8: Failing(
        "each episode needs a row group of its own, or their number must divide by the world's size",
        (
            "lerobot/test_rows.py::test_irregular_files_read_the_same",
            "lerobot/test_rows.py::test_a_shared_row_group_is_read_once",
            "end_to_end/test_every_frame.py::test_workers_that_divide_nothing_evenly",
        ),
    ),
    9: Failing(
        "the URL of a depth video on the Hub is given to FFmpeg, which can't open it",
        ("end_to_end/test_stores.py::test_a_depth_camera_of_the_hub",),
    ),
    10: Failing(
        "workers starve where there are fewer files than workers",
        (
            "end_to_end/test_placement.py::test_no_worker_starves_and_every_frame_comes_once",
            "end_to_end/test_every_frame.py::test_a_dataset_of_one_frame_and_two_workers",
        ),
    ),
    11: Failing(
        "ranks are left to the trainer, which reads everything on one or everywhere",
        (
            "end_to_end/test_every_frame.py::test_two_ranks_with_two_workers_each",
            "end_to_end/test_epochs.py::test_the_rank_is_found_in_the_environment",
            "end_to_end/test_placement.py::test_unprepared_loader_under_accelerate_counts_frames_once",
        ),
    ),
    12: Failing(
        "no state and no epoch, or only at the same layout, or what waits in a buffer is lost",
        (
            "torch/test_dataset_resume.py::test_over_any_world_sizes_just_what_was_left_comes",
            "torch/test_dataset_resume.py::test_state_of_the_async_iterator_is_of_delivered_samples",
            "end_to_end/test_placement.py::test_killed_ranks_are_resumed_by_one_and_by_four",
            "torch/test_dataset_stateful.py::test_other_layouts_share_just_what_was_left_again_and_again",
        ),
    ),
    13: Failing(
        "decoded frames are what is shuffled, by gigabytes a worker",
        (
            "stream/test_decode_jobs.py::test_samples_waiting_for_their_turn_are_bounded",
            "end_to_end/test_memory.py::test_memory_and_files_stay_flat_within_the_bounds",
        ),
    ),
    14: Failing(
        "caches are bounded by their number of entries, or not at all",
        (
            "decode/test_cache.py::test_memory_and_files_stay_flat_over_many_videos",
            "lerobot/test_episode_cache.py::test_the_decoder_goes_with_its_clip",
            "lerobot/test_episode_cache.py::test_rows_and_plans_are_kept_within_a_bound",
        ),
    ),
    15: Failing(
        "a lock is held while a video is opened, or one in use is closed",
        (
            "decode/test_cache.py::test_different_keys_open_at_the_same_time",
            "decode/test_cache.py::test_decoder_in_use_stays_open_when_it_is_evicted",
        ),
    ),
    16: Failing(
        "decoders are shared across a fork",
        (
            "decode/test_decoder.py::test_a_decoder_stays_in_its_process",
            "decode/test_cache.py::test_a_forked_child_starts_empty_even_if_the_lock_was_held",
            "torch/test_dataset.py::test_stream_is_read_in_parent_forked_workers_and_again",
        ),
    ),
    17: Failing(
        "one frame is decoded after the other, camera by camera, or in threads made for each sample",
        (
            "lerobot/test_episode_cache.py::test_episodes_and_cameras_are_fetched_in_one_wave",
            "decode/test_executor.py::test_pool_runs_all_its_threads_at_a_time_and_no_more",
            "stream/test_passes.py::test_an_epoch_opens_each_decoder_once",
        ),
    ),
    18: Failing(
        "the decoder seeks over a remote file by many small ranges",
        (
            "lerobot/test_episode_cache.py::test_clip_is_one_request_for_any_number_of_readers",
            "lerobot/test_episode_cache_traffic.py::test_a_shuffled_pass_fetches_little_more_than_it_needs",
        ),
    ),
    19: Failing(
        "a footer or header is fetched for each episode or camera, and caches and threads stay open",
        (
            "lerobot/test_metadata.py::test_a_footer_goes_with_its_table",
            "lerobot/test_rows.py::test_every_byte_of_a_file_is_fetched_once",
            "lerobot/test_episode_cache_clips.py::test_concurrent_plans_share_one_fetch",
            "end_to_end/test_lifecycle.py::test_threads_and_files_are_not_left_open",
        ),
    ),
    20: Failing(
        "boxes are built frame by frame in Python, 32 ms a clip",
        ("media/test_clip.py::test_a_header_takes_no_more_calls_for_more_frames",),
    ),
    21: Failing(
        "retries don't read Retry-After and RateLimit",
        (
            "fetch/test_http_faults.py::test_retry_after_is_honoured",
            "fetch/test_retry_quota.py::test_answer_with_the_last_of_a_quota_pauses_the_next",
            "fetch/test_hub.py::test_an_expired_url_is_replaced_in_one_flight",
            "fetch/test_http_redirects.py::test_secrets_stay_with_their_host",
        ),
    ),
    22: Failing(
        "an index takes 36 bytes a frame",
        ("media/test_index.py::test_an_index_takes_about_eight_bytes_a_frame",),
    ),
}


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("number", range(1, 23))
def test_failings_of_others_have_tests_here(number: int) -> None:
    assert FAILINGS[number].tests
    for name in FAILINGS[number].tests:
        path, _, test = name.partition("::")
        assert test.startswith("test_")
        assert test in names_in(path), name
