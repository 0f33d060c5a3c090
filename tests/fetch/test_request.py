"""Addresses of web urls."""

from __future__ import annotations

from asyncfetch.fetch.request import WebUrls


async def test_a_web_url_keeps_its_login_out_of_the_url() -> None:
    address = await WebUrls().resolve("https://me:pw@h/x")
    assert str(address.url) == "https://h/x"
    assert address.headers == {"Authorization": "Basic bWU6cHc="}
    assert "pw" not in repr(address)


async def test_a_password_needs_no_user() -> None:
    """As curl sends it, and as tokens are given to some gateways."""
    address = await WebUrls().resolve("https://:pw@h/x")
    assert str(address.url) == "https://h/x"
    assert address.headers == {"Authorization": "Basic OnB3"}
