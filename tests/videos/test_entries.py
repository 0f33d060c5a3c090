from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncfetch.errors import ConfigError, DatasetError, FormatError
from asyncfetch.fetch.urls import join_url
from asyncfetch.videos.entries import absolute_urls, check_names, check_spans, is_index, to_seconds


def column(*values: Any, kind: pa.DataType | None = None) -> pa.ChunkedArray[Any]:  # noqa: ANN401
    return pa.chunked_array([pa.array(list(values), kind)])


def seconds(*values: Any, kind: pa.DataType | None = None) -> list[float | None]:  # noqa: ANN401
    found: list[float | None] = to_seconds(column(*values, kind=kind), "t0", "a table").to_pylist()
    return found


# Times.


@given(st.integers(0, 359_999_999))
def test_text_of_a_time_is_the_float_nearest_to_it(milliseconds: int) -> None:
    whole, fraction = divmod(milliseconds, 1000)
    minutes, rest = divmod(whole, 60)
    texts = [
        f"{minutes // 60:02d}:{minutes % 60:02d}:{rest:02d}.{fraction:03d}",
        f"{minutes}:{rest:02d}.{fraction:03d}",
        f" {whole}.{fraction:03d} ",
    ]
    assert seconds(*texts) == [float(f"{whole}.{fraction:03d}")] * 3


@given(st.lists(st.none() | st.floats(0, allow_infinity=False), max_size=20))
def test_numbers_are_kept_and_their_text_means_the_same(values: list[float | None]) -> None:
    assert seconds(*values, kind=pa.float64()) == values
    assert seconds(*(None if value is None else repr(value) for value in values), kind=pa.string()) == values


def test_times_of_other_types() -> None:
    assert seconds(1, None, kind=pa.int32()) == [1.0, None]
    assert seconds(None, None) == [None, None]
    assert seconds("", " ", None, "7") == [None, None, None, 7.0]
    assert seconds("00:00:60.000", ".5", "5.", "1e-05") == [60.0, 0.5, 5.0, 1e-05]
    assert seconds(1500, kind=pa.duration("ms")) == [1.5]
    assert seconds(90_000_000, kind=pa.time64("us")) == [90.0]
    assert to_seconds(column("01:30", "9").dictionary_encode(), "t0", "a table").to_pylist() == [90.0, 9.0]


@pytest.mark.parametrize("value", ["-1", "1:2:3:4", "01:60:00", "00:61", "nan", "inf", "1,5", "soon"])
def test_text_that_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(DatasetError, match=r"row 2 of a table, counted from 0, has '.*' as its 't0', which is no time"):
        seconds("1", "00:01", value)


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_number_that_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(DatasetError, match=r"row 1 of .* has .* as its 't0', which is no time: a time is a number"):
        seconds(0.0, value)


def test_times_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(DatasetError, match="column 't0' of a table holds bool, as True: a time is"):
        seconds(True)


def test_a_span_that_ends_before_it_begins_is_refused() -> None:
    check_spans(column(0.0, None, 5.0), column(1.0, 0.5, None), "a table")
    with pytest.raises(
        DatasetError, match=r"row 1 of a table, .* is the span \[2.0, 2.0\) seconds: start must be less"
    ):
        check_spans(column(0.0, 2.0), column(1.0, 2.0), "a table")


# Urls.


def is_plain(text: str) -> bool:
    """Return whether it is a relative path without dots to resolve."""
    return "://" not in text and not text.startswith("/") and not {".", ".."} & {*text.split("/")}


def joined(base: str, *texts: str | None) -> list[str]:
    found: list[str] = absolute_urls(column(*texts, kind=pa.string()), base, "url", "a table").to_pylist()
    return found


@pytest.mark.parametrize(
    ("base", "text", "url"),
    [
        ("/data/t.csv", "v/a b.mp4", "/data/v/a b.mp4"),
        ("/data/t.csv", "../v/./a.mp4", "/v/a.mp4"),
        ("/data/t.csv", "/other/a.mp4", "/other/a.mp4"),
        ("/data/t.csv", "s3://b/a.mp4", "s3://b/a.mp4"),
        ("s3://b/x/t.csv", "v/a b.mp4", "s3://b/x/v/a b.mp4"),
        ("s3://b/x/t.csv", "../a.mp4", "s3://b/a.mp4"),
        ("s3://b/t.csv", "/mnt/a.mp4", "/mnt/a.mp4"),
        ("hf://datasets/o/n/data/t.csv", "a.mp4", "hf://datasets/o/n/data/a.mp4"),
        ("https://h/x/t.csv?token=1", "a b#ü.mp4", "https://h/x/a%20b%23%C3%BC.mp4?token=1"),
        ("https://h/x%20y/t.csv", "./a.mp4", "https://h/x%20y/a.mp4"),
        ("https://h/x/t.csv", "/a.mp4", "https://h/a.mp4"),
        ("https://h/t.csv", "../../a.mp4", "https://h/a.mp4"),
        ("https://h/x/t.csv?a=/b/c", "http://other/a%20b.mp4?q=1", "http://other/a%20b.mp4?q=1"),
        ("file:///data/t.csv", "a b.mp4", "file:///data/a%20b.mp4"),
    ],
)
def test_urls_are_joined_to_the_table_s_own(base: str, text: str, url: str) -> None:
    assert joined(base, text) == [url]
    assert joined(base, "plain.mp4", text, text, "https://h/0.mp4")[1:3] == [url, url]


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1).filter(is_plain), min_size=1))
@example(["a b.mp4", "c.mp4"])
def test_any_path_is_joined_as_one_url_is(texts: list[str]) -> None:
    for root in ("/data", "s3://bucket/x", "https://h/x%20y?token=1", "file:///data"):
        table = join_url(root, "t.csv")
        assert joined(table, *texts) == [join_url(root, text) for text in texts]


def test_urls_of_other_types_become_strings() -> None:
    for kind in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        found = absolute_urls(column("a.mp4", "b.mp4").cast(kind), "/d/t.csv", "url", "a table")
        assert (found.type, found.to_pylist()) == (pa.string(), ["/d/a.mp4", "/d/b.mp4"])


@pytest.mark.parametrize("value", [None, ""])
def test_an_empty_url_is_refused(value: str | None) -> None:
    with pytest.raises(DatasetError, match=r"row 1 of a table, counted from 0, has .* as its 'url', which must be"):
        joined("/d/t.csv", "a.mp4", value)


def test_urls_that_are_no_texts_are_refused() -> None:
    with pytest.raises(DatasetError, match="column 'url' of a table must hold urls or paths as text, not int64, as 7"):
        absolute_urls(column(7), "/d/t.csv", "url", "a table")


# Names.


def test_names_that_are_not_there_doubled_or_taken() -> None:
    asked: dict[str, str | None] = {"video": "url", "start": None, "stop": None}
    check_names(["url", "caption"], asked, "a table")
    check_names(["video", "start"], {"video": "video", "start": "start", "stop": None}, "a table")
    with pytest.raises(ConfigError, match="video='url': a table has no such column; it has path, caption"):
        check_names(["path", "caption"], asked, "a table")
    with pytest.raises(ConfigError, match="two columns 'url'"):
        check_names(["url", "url"], asked, "a table")
    with pytest.raises(ConfigError, match=r"a column 'size', a name that asyncfetch uses itself .*: rename it"):
        check_names(["url", "size"], asked, "a table")
    with pytest.raises(ConfigError, match=r"a column 'start', .*, or pass start='start' if it is that"):
        check_names(["url", "start"], asked, "a table")


def test_an_index_is_told_by_its_metadata() -> None:
    names = ["video", "offset", "size", "start", "stop"]
    table = pa.table({name: pa.nulls(0) for name in names})
    assert not is_index(table, "t")
    assert is_index(table.replace_schema_metadata({b"asyncfetch.index": b"1"}), "t")
    with pytest.raises(FormatError, match="is of version 2; this asyncfetch reads version 1; write it anew"):
        is_index(table.replace_schema_metadata({b"asyncfetch.index": b"2"}), "t")
    with pytest.raises(FormatError, match="the index t lacks stop"):
        is_index(table.drop(["stop"]).replace_schema_metadata({b"asyncfetch.index": b"1"}), "t")
