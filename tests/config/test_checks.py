"""What a configuration's fields may hold: everything else is refused where it is written, not where it is used."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncfetch as af

KINDS = (af.FetchConfig, af.TimeoutConfig, af.RetryConfig, af.HedgeConfig, af.S3Config, af.StreamConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_field_with_an_impossible_value_is_refused_by_name(kind: Any) -> None:  # noqa: ANN401
    values: tuple[object, ...] = (b"x", [], object(), math.nan, 1 + 0j, 10**400, -(10**5000))
    for name in kind.__dataclass_fields__:
        for value in (*values, *(() if name in {"region", "profile"} else ("",))):
            with pytest.raises(af.ConfigError, match=name) as caught:
                kind(**{name: value})
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_requests_per_host": "64"}, "max_requests_per_host must be a whole number, not '64': write 64"),
        ({"max_requests_per_host": 1.5}, "max_requests_per_host must be a whole number, not 1.5"),
        ({"max_redirects": True}, "max_redirects must be a whole number, not True"),
        ({"part_bytes": None}, "part_bytes must be a whole number, not None"),
        ({"max_bytes_per_second": "1"}, "max_bytes_per_second must be a whole number or None, not '1': write 1"),
        ({"learn_limit": 1}, "learn_limit must be True or False, not 1"),
        ({"timeouts": 5}, "timeouts must be a TimeoutConfig, not 5"),
        ({"hedge": False}, "hedge must be a HedgeConfig or None, not False"),
        ({"keepalive_seconds": math.inf}, "keepalive_seconds must be positive and finite"),
        ({"max_listed_entries": 0}, "max_listed_entries must be at least 1, not 0"),
        ({"ca_file": ""}, "ca_file must name a file, or be None"),
        *(
            ({"hub_endpoint": endpoint}, "hub_endpoint '.*' names no host, or a port that is none")
            for endpoint in ("https://", "https://:80", "https://h:99999", "https://h:0", "https://h:x", "http://[::1")
        ),
        ({"hub_endpoint": "https://h?token=hidden"}, "hub_endpoint must have no query and no fragment"),
        ({"hub_endpoint": "https://me:hidd/hidden@h"}, "hub_endpoint must not hold a password"),
        ({"hub_endpoint": "me:hidden@h"}, "hub_endpoint must not hold a password"),
        ({"tokens": {"h": 5}}, r"tokens\['h'\] must be a string, not of type int"),
        *(
            ({"tokens": {"h": token}}, r"tokens\['h'\] must be printable ASCII without spaces, .* strip\(\)")
            for token in ("", "hidden\n", " hidden", "hidden\x1f", "hidden\tit", "hidden\xa0", "hidden\nX-Evil: 1")
        ),
        ({"tokens": {5: "x"}}, "tokens are by host, .* not by 5"),
        ({"tokens": {"https://me:hidden@h/": "x"}}, r"tokens are by host, .* not by 'https://\*\*\*@h/'"),
        ({"headers": {"h": "hidden"}}, r"headers\['h'\] must be a mapping of strings by header, not of type str"),
        ({"headers": {"h": {"Cookie": b"hidden"}}}, r"headers\['h'\]\['Cookie'\] must be a string, not of type bytes"),
        ({"headers": {"h": {"Cookie": None}}}, r"headers\['h'\]\['Cookie'\] must be a string, not of type NoneType"),
        *(
            ({"headers": {"h": {"Cookie": text}}}, r"headers\['h'\]\['Cookie'\] must hold no control character: .*")
            for text in ("hidden\r\n", "hidden\0", "hidden\x7f")
        ),
        *(
            ({"headers": {"h": {name: "x"}}}, r"headers\['h'\] has a name that no header can have: letters, .*")
            for name in ("", "hid den", "hidden:", "Cookie: hidden", "hidd\xe9n", "hidden\n", 5)
        ),
        ({"tokens": {"h:1": "hidden", "H:1": "x"}}, r"tokens\['H:1'\] is there twice, in capitals and without"),
        ({"headers": {"h/x": {}}}, "headers are by host, .* not by 'h/x'"),
        ({"fsspec": {"gs": ["hidden"]}}, r"fsspec\['gs'\] must be a mapping of arguments by name, not of type list"),
        ({"fsspec": {"gs://": {}}}, "fsspec are by scheme, .* not by 'gs://'"),
    ],
    ids=str,
)
def test_the_message_says_what_can_be_meant_and_shows_no_secret(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(af.ConfigError, match=f"^{message}") as caught:
        af.FetchConfig(**settings)
    assert "hidden" not in str(caught.value)


def test_names_of_hosts_and_schemes_have_no_case() -> None:
    config = af.FetchConfig(tokens={"Data.Example.ORG:8443": "T"}, headers={"H": {"X-Key": "V"}}, fsspec={"GS": {}})
    assert config.tokens == {"data.example.org:8443": "T"}
    assert config.headers == {"h": {"X-Key": "V"}}
    assert config.fsspec == {"gs": {}}


def test_headers_may_hold_what_a_line_can() -> None:
    headers = {"x-it's_~!": "", "Cookie": "a\tb; c=\xfc\u20ac", "Authorization": "Basic YTpi"}
    assert af.FetchConfig(headers={"h": headers}).headers["h"] == headers


def test_numbers_of_numpy_and_paths_are_as_good() -> None:
    config: Any = af.FetchConfig
    numbers = config(max_requests_per_host=np.uint8(200), keepalive_seconds=np.float32(2))
    assert (numbers.max_requests_per_host, numbers.keepalive_seconds) == (200, 2)
    assert (type(numbers.max_requests_per_host), type(numbers.keepalive_seconds)) == (int, float)  # none overflows
    assert config(keepalive_seconds=3, ca_file=Path("ca.pem")).ca_file == Path("ca.pem")
    assert af.TimeoutConfig(stall_seconds=math.inf).stall_seconds == math.inf
    assert af.StreamConfig(disk_cache_dir=Path("/scratch")).disk_cache_dir == Path("/scratch")


def test_a_pool_has_a_segment() -> None:
    with pytest.raises(af.ConfigError, match="pool_segments must be at least 1, not 0"):
        af.StreamConfig(pool_segments=0)
