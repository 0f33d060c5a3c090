"""Where a redirect leads, which secrets go with it, and the name of an object whose url is signed."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from asyncfetch.errors import ConfigError, InvalidResponse
from asyncfetch.fetch.retry import AttemptFailed
from asyncfetch.fetch.transports.file import local_path
from asyncfetch.fetch.urls import join_url, next_url, object_name, origin_of, parse_url, static_headers
from asyncfetch.tensors.server import normal_server

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("/y?z=1#frag", "https://a.org/y?z=1"),
        ("y", "https://a.org/p/y"),
        ("//b.org/y", "https://b.org/y"),
        ("https://u:p@b.org/y", "https://b.org/y"),
        ("https://:p@b.org/y", "https://b.org/y"),
        ("https://b.org/a%2Fb?s=%7e%2b", "https://b.org/a%2Fb?s=%7e%2b"),
    ],
)
def test_redirect_target(location: str, target: str) -> None:
    assert str(next_url(URL("https://a.org/p/x"), location)) == target


@pytest.mark.parametrize("location", [None, "", "http://a.org/x", "ftp://a.org/x", "https://a:99999/", "//[]@/x"])
def test_bad_redirects_are_refused(location: str | None) -> None:
    with pytest.raises(AttemptFailed) as caught:
        next_url(URL("https://a.org/p/x"), location)
    assert caught.value.kind is InvalidResponse


@pytest.mark.parametrize("text", ["http://", "http:///x", "http://a:99999/", "https://a:b/", "http://[]@/x"])
def test_bad_urls_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError, match="no http url"):
        parse_url(text)


@pytest.mark.parametrize(
    "text", ["https://me:hunter/two@h/x", "https://me:hunter@", "https://me:hunter@two@h:99999/?sig=hunter"]
)
def test_a_bad_url_is_told_without_what_may_be_its_password(text: str) -> None:
    with pytest.raises(ConfigError, match="no http url") as caught:
        parse_url(text)
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter" not in shown
    assert "two" not in shown


@pytest.mark.parametrize(
    "text",
    ["h/a\tb", "h/a\nb", "h/a\r\n", "h\n/a", "h/a?b=\0", "h/\x7f", "me:hunter\ntwo@h/x", "h/a?sig=hunter\ntwo\t"],
)
@pytest.mark.parametrize("names", [parse_url, lambda url: join_url(url, "x"), local_path, normal_server])
def test_a_url_with_a_control_character_is_refused(names: Callable[[str], object], text: str) -> None:
    """Where it were left out, the url would name another object."""
    scheme = "file" if names is local_path else "https"
    with pytest.raises(ConfigError, match=r"holds a control character: .* strip\(\)") as caught:
        names(f"{scheme}://{text}")
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter" not in shown
    assert "two" not in shown


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("http://h/a b", "/a%20b"),
        ("http://h/100%.bin", "/100%25.bin"),
        ("http://h/%7e?x=a+b&y=%2F", "/%7e?x=a+b&y=%2F"),
    ],
)
def test_urls_are_requoted_only_where_they_must_be(text: str, sent: str) -> None:
    assert parse_url(text).raw_path_qs == sent


def test_an_origin_is_scheme_host_and_port() -> None:
    assert origin_of(parse_url("HTTPS://Example.ORG/x")) == "https://example.org:443"
    assert origin_of(parse_url("http://[::1]:81/")) == "http://[::1]:81"


def headers_for(text: str, **kinds: object) -> dict[str, str]:
    settings: dict[str, Any] = {"is_named": True, "headers": {}, "tokens": {}, "login": None} | kinds
    return static_headers(parse_url(text), **settings)


def test_headers_belong_to_their_host_and_port() -> None:
    config = {"a.org": {"X-Key": "all"}, "a.org:8443": {"X-Key": "one"}}
    assert headers_for("https://a.org/", headers=config) == {"X-Key": "all"}
    assert headers_for("https://a.org:8443/", headers=config) == {"X-Key": "one"}
    assert headers_for("https://b.org/", headers=config) == {}


def test_header_of_host_and_port_wins_in_any_case_of_its_name() -> None:
    config = {"a.org": {"authorization": "all", "X-Key": "all"}, "a.org:443": {"Authorization": "one", "x-key": "one"}}
    assert headers_for("https://a.org/", headers=config) == {"Authorization": "one", "x-key": "one"}


@pytest.mark.parametrize(
    ("url", "reached"),
    [
        ("https://a.org/", {"X-Key": "bare", "Authorization": "Bearer bare"}),
        ("https://a.org:8443/", {"X-Key": "one", "Authorization": "Bearer one"}),
        ("https://a.org:9443/", {}),
        ("http://a.org/", {}),
        ("http://a.org:443/", {}),
        ("https://sub.a.org/", {}),
    ],
)
def test_secrets_go_where_a_redirect_may_take_them(url: str, reached: dict[str, str]) -> None:
    headers = {"a.org": {"X-Key": "bare"}, "a.org:8443": {"X-Key": "one"}}
    tokens = {"a.org": "bare", "a.org:8443": "one"}
    assert headers_for(url, is_named=False, headers=headers, tokens=tokens) == reached


def test_a_login_goes_with_a_redirect_to_its_hosts_https_only() -> None:
    login = ("u", "p")
    assert headers_for("https://a.org/", is_named=False, login=login) == {"Authorization": "Basic dTpw"}
    assert headers_for("https://a.org:8443/", is_named=False, login=login) == {}
    assert headers_for("http://a.org/", is_named=False, login=login) == {}


def test_tokens_go_over_https_and_to_loopback_only() -> None:
    tokens = {"a.org": "t", "127.0.0.1": "t"}
    assert headers_for("https://a.org/", tokens=tokens) == {"Authorization": "Bearer t"}
    assert headers_for("http://127.0.0.1/", tokens=tokens) == {"Authorization": "Bearer t"}
    assert headers_for("http://a.org/", tokens=tokens) == {}


def test_a_header_beats_a_token_beats_a_login() -> None:
    login, tokens = ("u", "p"), {"a.org": "t"}
    own = {"a.org": {"authorization": "mine"}}
    assert headers_for("https://a.org/", headers=own, tokens=tokens, login=login) == {"authorization": "mine"}
    assert headers_for("https://a.org/", tokens=tokens, login=login) == {"Authorization": "Bearer t"}
    assert headers_for("https://a.org/", login=login) == {"Authorization": "Basic dTpw"}


def test_headers_that_the_engine_sets_are_refused() -> None:
    with pytest.raises(ConfigError, match="range"):
        headers_for("https://a.org/", headers={"a.org": {"range": "bytes=0-1"}})


OBJECT = "https://bucket.example.org/a/b.mp4"
SIGNATURES = {
    "s3": "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K%2F1&X-Amz-Date={0}&X-Amz-Expires=9"
    "&X-Amz-SignedHeaders=host&X-Amz-Security-Token={0}&X-Amz-Signature={0}",
    "s3, first form": "AWSAccessKeyId=K&Signature={0}&Expires={0}",
    "google": "X-Goog-Algorithm=A&X-Goog-Credential={0}&X-Goog-Date=1&X-Goog-Expires=1&X-Goog-SignedHeaders=host"
    "&X-Goog-Signature={0}",
    "cloudfront": "Policy={0}&Signature={0}&Key-Pair-Id=K",
    "azure": "sv=2024-01-01&se={0}&sr=b&sp=r&sig={0}",
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_two_signatures_of_one_object_give_one_name(kind: str) -> None:
    first, second = (f"{OBJECT}?{SIGNATURES[kind].format(number)}" for number in (1, 22))
    assert object_name(first) == object_name(second) == OBJECT


@pytest.mark.parametrize("kind", SIGNATURES)
def test_parameter_that_names_a_version_stays_in_any_place(kind: str) -> None:
    signature = SIGNATURES[kind].format("x")
    for query in (f"versionId=3&{signature}", f"{signature}&versionId=3"):
        assert object_name(f"{OBJECT}?{query}#part") == f"{OBJECT}?versionId=3#part"


@pytest.mark.parametrize("query", ["expires=3", "st=2&se=5", "policy=open", "token=a", "x-amz-date=1", "", "a&b=&=c"])
def test_parameters_all_count_without_a_signature(query: str) -> None:
    assert object_name(f"{OBJECT}?{query}") == f"{OBJECT}?{query}"


@given(st.text(max_size=60))
def test_a_name_is_its_own_name(url: str) -> None:
    assert object_name(object_name(url)) == object_name(url)
