"""Urls with braces and wildcards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from braceexpand import braceexpand
from hypothesis import given
from hypothesis import strategies as st

from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, NotFound
from asyncfetch.fetch import Fetcher
from asyncfetch.testing import HubServer, S3Server
from asyncfetch.videos.listing import MAX_URLS, expand_braces, find_files, split_wildcards
from tests.merge.on_s3 import config as s3_config
from tests.merge.on_s3 import set_keys

if TYPE_CHECKING:
    from pathlib import Path

FILES = ["a/1.tar", "a/2.tar", "a/b/3.tar", "a/b/c/4.tar", "a/b/c/4.txt", "a/x-[y].tar", "top.tar"]


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("s3://b/{000000..000002}.tar", ["s3://b/000000.tar", "s3://b/000001.tar", "s3://b/000002.tar"]),
        ("{a,b}{1..2}", ["a1", "a2", "b1", "b2"]),
        ("{a,b{1,2}}.tar", ["a.tar", "b1.tar", "b2.tar"]),
        ("{9..11}", ["9", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..10..5}", ["0", "5", "10"]),
        ("{a..c}", ["a", "b", "c"]),
        ("{a,}", ["a", ""]),
        ("{a{b,c}}", ["{ab}", "{ac}"]),
        ("{a}.tar", ["{a}.tar"]),
        ("a{b", ["a{b"]),
        ("a}b", ["a}b"]),
        ("{}", ["{}"]),
        ("", [""]),
    ],
)
def test_braces_are_written_out(text: str, expanded: list[str]) -> None:
    assert expand_braces(text) == expanded


@given(
    st.recursive(
        st.sampled_from(["x", "shard-", "{0..3}", "{007..11}", "{09..100..45}", "{c..a}", "{5..5}", ".tar"]),
        lambda parts: st.one_of(
            st.lists(parts, min_size=2, max_size=3).map(lambda each: "{" + ",".join(each) + "}"),
            st.lists(parts, min_size=1, max_size=3).map("".join),
        ),
        max_leaves=6,
    )
)
def test_braces_are_expanded_as_braceexpand_does(text: str) -> None:
    assert expand_braces(text) == list(braceexpand(text))


@pytest.mark.parametrize("text", ["{1..99999999}", "{1..2000}{1..2000}"])
def test_braces_stand_for_no_more_than_a_bound(text: str) -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_URLS} urls"):
        expand_braces(text)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("hf://datasets/o/n/**/*.tar", ("hf://datasets/o/n/", "**/*.tar")),
        ("s3://b/p-*/x.tar", ("s3://b/", "p-*/x.tar")),
        ("https://h/a.tar?sig=1", ("https://h/a.tar?sig=1", "")),
        ("/a/b.tar", ("/a/b.tar", "")),
    ],
)
def test_the_directory_is_what_has_no_wildcard(url: str, parts: tuple[str, str]) -> None:
    assert split_wildcards(url) == parts


WILDCARDS = {
    "*.tar": ["top.tar"],
    "a/*.tar": ["a/1.tar", "a/2.tar", "a/x-[y].tar"],
    "**/*.tar": [name for name in sorted(FILES) if name.endswith(".tar")],
    "a/**/c/4.*": ["a/b/c/4.tar", "a/b/c/4.txt"],
    "a/?.tar": ["a/1.tar", "a/2.tar"],
    "a/[!1x]*.tar": ["a/2.tar"],
    "a/{2,1}*.tar": ["a/2.tar", "a/1.tar"],
    "a/x-[[]*.tar": ["a/x-[y].tar"],
    "**": sorted(FILES),
}


@pytest.mark.parametrize("pattern", WILDCARDS)
async def test_wildcards_are_looked_for_in_folders(tmp_path: Path, pattern: str) -> None:
    root = tmp_path / "with space"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    async with Fetcher() as fetcher:
        found = await find_files(f"{root}/{pattern}", fetcher)
        by_url = await find_files(f"{root.as_uri()}/{pattern}", fetcher)
    assert found.urls == [f"{root}/{name}" for name in WILDCARDS[pattern]]
    assert [url.replace("%5B", "[").replace("%5D", "]") for url in by_url.urls] == [
        f"{root.as_uri()}/{name}" for name in WILDCARDS[pattern]
    ]


async def test_wildcards_are_looked_for_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    set_keys(monkeypatch)
    async with (
        S3Server({f"bucket/set/{name}": b"" for name in FILES}) as server,
        Fetcher(s3_config(server)) as fetcher,
    ):
        for pattern, names in WILDCARDS.items():
            found = await find_files(f"s3://bucket/set/{pattern}", fetcher)
            assert found.urls == [f"s3://bucket/set/{name}" for name in names]
            assert found.listed >= set(found.urls)


async def test_wildcards_are_looked_for_on_the_hub() -> None:
    async with HubServer() as hub:
        hub.push("datasets/o/n", dict.fromkeys(FILES, b"x"))
        async with Fetcher(FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url)) as fetcher:
            found = await find_files("hf://datasets/o/n/**/*.tar", fetcher)
            revised = await find_files("hf://datasets/o/n@main/a/*.tar", fetcher)
    assert found.urls == [f"hf://datasets/o/n/{name}" for name in WILDCARDS["**/*.tar"]]
    assert revised.urls == [f"hf://datasets/o/n@main/{name}" for name in WILDCARDS["a/*.tar"]]


async def test_a_url_without_wildcards_is_not_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with Fetcher() as fetcher:
        found = await find_files(["https://nowhere.invalid/{a,b}.tar?x", tmp_path / "c.tar", "d.tar"], fetcher)
        assert found.urls == [
            *("https://nowhere.invalid/a.tar?x", "https://nowhere.invalid/b.tar?x"),
            *(f"{tmp_path}/c.tar", f"{tmp_path}/d.tar"),
        ]
        assert not found.listed
        with pytest.raises(ConfigError, match=r"no file matches .*\*\.tar', of 0 below"):
            await find_files(f"{tmp_path}/*.tar", fetcher)
        with pytest.raises(NotFound):
            await find_files(f"{tmp_path}/nowhere/*.tar", fetcher)
        with pytest.raises(ConfigError, match="must be a string, not of type int"):
            await find_files([3], fetcher)  # type: ignore[list-item]
