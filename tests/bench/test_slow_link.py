"""bench/slow_link.py, tiny: the engine and the bare client bring every range, and the figures are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from bench import nginx, slow_link

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("needs_nginx")


@pytest.mark.usefixtures("needs_lua")
@pytest.mark.parametrize("tls", [True, False])
def test_every_client_is_measured_against_the_ideal(tmp_path: Path, tls: bool) -> None:
    links = slow_link.measure_slow_link(
        tmp_path, repeats=1, ranges=10, range_bytes=1000, concurrency=4, first_byte_seconds=0.2, tls=tls
    )
    assert {link.tls for link in links} == {tls}
    taken, kept = links[::2], links[1::2]
    assert [link.client for link in taken] == ["asyncfetch", "asyncfetch by default", "bare asyncio"]
    assert [link.client for link in kept] == [f"{link.client}, all kept" for link in taken]
    for link, bare in ((taken[0], taken[2]), (taken[2], taken[2]), (kept[0], kept[2]), (kept[2], kept[2])):
        assert link.alone_seconds >= 0.2
        assert link.all_seconds >= 0.6  # three turns; by default neighbours as near as these come together
        assert link.share_of_ideal == pytest.approx(3 * link.alone_seconds / link.all_seconds)
        assert link.share_of_bare == pytest.approx(bare.all_seconds / link.all_seconds)
        assert 0 <= link.full_cores_share <= 1


def test_the_bare_client_fails_where_a_range_does_not_come(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"0123456789")

    async def fetch(server: nginx.NginxServer) -> None:
        async with slow_link.BareClient(server, "short", range_bytes=4, concurrency=2) as client:
            await client.fetch_each([0, 4, 6])
            fetched = await client.fetch_all([0, 4, 6])
            assert [bytes(one[-4:]) for one in fetched] == [b"0123", b"4567", b"6789"]
            with pytest.raises(ExceptionGroup) as caught:
                await client.fetch_all([0, 10])
        assert caught.group_contains(ConnectionError, match="206")

    with nginx.NginxServer(tmp_path) as server:
        anyio.run(fetch, server)
