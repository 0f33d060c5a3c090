from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.errors import AsyncFetchError, DatasetError, FormatError
from asyncfetch.fetch.urls import join_url
from asyncfetch.lerobot.info import DEFAULT_FEATURES, PathTemplate, parse_info

SCALARS: dict[str, Any] = {key: {"dtype": "int64", "shape": [1], "names": None} for key in DEFAULT_FEATURES}
INFO: dict[str, Any] = {
    "codebase_version": "v3.0",
    "fps": 30,
    "total_episodes": 2,
    "total_frames": 7,
    "features": SCALARS,
}


def parse(**changes: Any) -> Any:  # noqa: ANN401
    info = {key: value for key, value in {**INFO, **changes}.items() if value is not ...}
    return parse_info(json.dumps(info).encode(), "root/meta/info.json")


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"dtype": "float32", "shape": [6]}, "value"),
        ({"dtype": "bool", "shape": [1]}, "value"),
        ({"dtype": "string", "shape": [1]}, "string"),
        ({"dtype": "image", "shape": [8, 8, 3]}, "image"),
        ({"dtype": "language", "shape": [1]}, "language"),
        ({"dtype": "video", "shape": [8, 8, 3]}, "video"),
        ({"dtype": "video", "shape": [8, 8, 3], "info": {"is_depth_map": False}}, "video"),
        ({"dtype": "video", "shape": [8, 8, 1], "info": {"is_depth_map": True}}, "depth"),
        ({"dtype": "video", "shape": [8, 8, 1], "info": {"video.is_depth_map": True}}, "depth"),
        ({"dtype": "video", "shape": [8, 8, 1], "video_info": {"video.is_depth_map": True}}, "depth"),
        ({"dtype": "audio", "shape": [1]}, "audio"),
        ({"dtype": "f4,f4", "shape": [1]}, "other"),
    ],
)
def test_kind_of_feature(block: dict[str, Any], kind: str) -> None:
    assert parse(features={**SCALARS, "x": block}).features["x"].kind == kind


def test_unknown_keys_and_missing_optional_ones_are_fine() -> None:
    info = parse(total_videos=4, tools=[{"name": "x"}])
    assert (info.chunks_size, info.robot_type, info.total_tasks) == (1000, None, None)
    assert info.data_path.format(chunk_index=0, file_index=1000) == "data/chunk-000/file-1000.parquet"


@pytest.mark.parametrize("version", ["v2.1", "2.0", "v1.6"])
def test_older_versions_are_refused_with_the_way_out(version: str) -> None:
    with pytest.raises(DatasetError, match=r"LeRobot v?\d\.\d .*`asyncfetch convert"):
        parse(codebase_version=version)


def test_newer_versions_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"v4\.0 .*Upgrade asyncfetch"):
        parse(codebase_version="v4.0")


def test_minor_versions_are_read() -> None:
    assert parse(codebase_version="v3.1").version == "v3.1"


def test_missing_default_features_are_named_and_the_present_ones() -> None:
    features = {key: SCALARS[key] for key in ("index", "timestamp", "episode_index")}
    with pytest.raises(
        DatasetError, match=r"lack frame_index, task_index.*present are index, timestamp, episode_index"
    ):
        parse(features=features)


@pytest.mark.parametrize(
    "changes",
    [
        {"fps": 0},
        {"fps": -1},
        {"fps": True},
        {"fps": "30"},
        {"fps": float("nan")},
        {"fps": 10**400},
        {"chunks_size": 0},
        {"total_episodes": 2.5},
        {"total_frames": -1},
        {"total_episodes": ...},
        {"features": []},
        {"features": {**SCALARS, "x": {"dtype": "float32", "shape": 6}}},
        {"features": {**SCALARS, "x": {"shape": [6]}}},
        {"features": {**SCALARS, "x": {"dtype": "video", "shape": [6], "info": "x"}}},
        {"features": {**SCALARS, "x": {"dtype": "video", "shape": [6], "video_info": [1]}}},
        {"features": {**SCALARS, "index": {"dtype": "audio", "shape": [1]}}},
        {"data_path": 3},
        {"codebase_version": None},
        {"storage_format": "lance"},
    ],
    ids=str,
)
def test_values_that_cannot_be_meant(changes: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=f"{next(iter(changes))}|feature '(x|index)'"):
        parse(**changes)


def test_cameras_may_not_share_their_video() -> None:
    video = {"dtype": "video", "shape": [4, 4, 3]}
    path = "videos/{{video_key}}/{chunk_index}/{file_index}.mp4"  # braces, not a field
    assert parse(features={**SCALARS, "a": video}, video_path=path).video_path is not None
    with pytest.raises(DatasetError, match=r"has no .video_key.: a and b would show the same pictures"):
        parse(features={**SCALARS, "a": video, "b": video}, video_path=path)


def test_an_error_page_is_shown() -> None:
    with pytest.raises(FormatError, match=r"root/meta/info.json isn't JSON.*begin '<html>"):
        parse_info(b"<html><body>Sign in</body></html>", "root/meta/info.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.sampled_from(sorted(INFO)) | st.text(), s),
        max_leaves=20,
    )
)
def test_any_json_is_read_or_refused_by_an_error_of_ours(value: Any) -> None:  # noqa: ANN401
    document = {**INFO, **value} if isinstance(value, dict) else value
    with contextlib.suppress(AsyncFetchError):
        parse_info(json.dumps(document).encode(), "u")


@pytest.mark.parametrize(
    ("root", "path", "url"),
    [
        ("https://h/a b", "v/x#1 %.mp4", "https://h/a b/v/x%231%20%25.mp4"),
        ("https://h/set/", "meta/info.json", "https://h/set/meta/info.json"),
        ("https://h/set?token=a%2Fb", "m", "https://h/set/m?token=a%2Fb"),
        ("file:///data/set", "x#1", "file:///data/set/x%231"),
        ("/data/set/", "x#1", "/data/set/x#1"),
        ("", "m", "m"),
        ("s3://bucket/set", "x#1", "s3://bucket/set/x#1"),
        ("s3://", "meta/info.json", "s3:///meta/info.json"),
        ("s3://b/", "x", "s3://b/x"),
        ("/data\t/set\n", "x", "/data\t/set\n/x"),
    ],
)
def test_join_url(root: str, path: str, url: str) -> None:
    assert join_url(root, path) == url


@pytest.mark.parametrize(
    "text",
    [
        "{chunk_index.__class__}",
        "{0}",
        "{file_index:0999999999d}",
        "{file_index!r}",
        "{video_key:>99}",
        "{episode_index}",
        "{file_index:{chunk_index}d}",
        "{",
    ],
)
def test_templates_cannot_do_more_than_place_their_fields(text: str) -> None:
    with pytest.raises(FormatError, match="path template"):
        PathTemplate(text)


@pytest.mark.parametrize("text", ["../{video_key}", "/etc/{video_key}", "a/{video_key}/../../b"])
def test_paths_stay_below_the_root(text: str) -> None:
    with pytest.raises(FormatError, match="relative to the dataset's root"):
        PathTemplate(text).format(chunk_index=0, file_index=0, video_key="x")


def test_a_feature_name_cannot_leave_the_root() -> None:
    with pytest.raises(FormatError, match="relative to the dataset's root"):
        PathTemplate("videos/{video_key}/a.mp4").format(chunk_index=0, file_index=0, video_key="../..")
