"""bench/cache_pool.py runs, and says what is so by contract."""

from __future__ import annotations

from bench.cache_pool import run


def test_every_file_is_read_once() -> None:
    figures = run(files=32, repeats=1, workers=4)
    assert figures["reads a file"] == 1
    assert figures["staged / by itself"] > 1
    assert 0 < figures["lock held, p50 us"] < 1000
