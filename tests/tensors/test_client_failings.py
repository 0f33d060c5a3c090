"""Those of the failings R1 to R16 that every back end could have: over HTTP and over a real Ray."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncfetch.errors import ConfigError, ShardNotFound, TensorError
from asyncfetch.tensors.client import COPIED_EARLY_BYTES, TensorSession
from asyncfetch.tensors.remote import bytes_of
from asyncfetch.tensors.wire import DTYPES
from tests.tensors.conftest import MIB, store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncfetch.tensors import RemoteTensor, TensorClient
    from tests.tensors.conftest import Backend


class Held:
    """Fetches stand still at the door of the back end until ``go`` is set."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()

    async def wait_asked(self) -> None:
        assert await anyio.to_thread.run_sync(self.asked.wait, 10)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """For clients that are entered afterwards."""
    held, fetch = Held(), TensorSession._fetch

    async def wait_and_fetch(session: TensorSession, batch: Sequence[RemoteTensor]) -> Any:  # noqa: ANN401
        held.asked.set()
        await anyio.to_thread.run_sync(held.go.wait, 10)
        return await fetch(session, batch)

    monkeypatch.setattr(TensorSession, "_fetch", wait_and_fetch)
    return held


async def test_r1_duplicates_in_one_structure_are_fetched_once(backend: Backend, client: TensorClient) -> None:
    [first, second] = await store(client, backend.server, torch.ones(3), torch.zeros(3))
    local = await client.localize({"a": first, "b": [first, second], "c": (first,)})
    assert torch.equal(local["c"][0], torch.ones(3))
    assert client.statistics().fetched == 2


@pytest.mark.parametrize("length", [3, COPIED_EARLY_BYTES])
async def test_r2_five_waiters_one_cancelled_one_fetch_four_results(
    held: Held, backend: Backend, client: TensorClient, length: int
) -> None:
    [remote] = await store(client, backend.server, torch.ones(length))
    results = []
    first = anyio.CancelScope()

    async def ask(scope: anyio.CancelScope) -> None:
        with scope:
            results.append(await client.localize(remote))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, first)
        await held.wait_asked()
        for _ in range(4):
            tasks.start_soon(ask, anyio.CancelScope())
        while client.statistics().misses < 5:  # noqa: ASYNC110 - another thread counts
            await anyio.sleep(0.001)
        first.cancel()
        await anyio.wait_all_tasks_blocked()
        held.go.set()
    assert len({tensor.data_ptr() for tensor in results}) == 4  # R4: each has its own
    assert all(torch.equal(tensor, torch.ones(length)) for tensor in results)
    assert client.statistics().fetched == 1


async def test_r3_a_clear_during_the_fetch_stays_cleared(held: Held, backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.ones(3))
    got = []

    async def ask() -> None:
        got.append(await client.localize(remote))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await held.wait_asked()
        assert client.clear_all() == 0
        held.go.set()
    assert torch.equal(got[0], torch.ones(3))  # who had asked is served
    now = client.statistics()
    assert (now.entries, now.bytes, now.in_flight, now.in_flight_bytes) == (0, 0, 0, 0)


async def test_r4_an_edit_by_one_consumer_isnt_seen_by_another(backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.ones(3))
    first, second = await client.localize(remote), await client.localize(remote)
    first.add_(1)
    assert torch.equal(second, torch.ones(3))
    assert torch.equal(await client.localize(remote), torch.ones(3))


async def test_r4_the_store_owns_its_bytes(backend: Backend, client: TensorClient) -> None:
    mine = torch.ones(100_000)
    [remote] = await store(client, backend.server, mine)
    mine.add_(1)
    assert torch.equal(await client.localize(remote), torch.ones(100_000))


async def test_r4_views_are_shared_and_an_edit_is_noticed(backend: Backend, caplog: pytest.LogCaptureFixture) -> None:
    async with backend.client(delivery="view") as client, backend.client() as other:
        [remote] = await store(client, backend.server, torch.ones(100_000))
        first, second = await client.localize(remote), await client.localize(remote)
        assert first.data_ptr() == second.data_ptr()
        first.add_(1)
        assert torch.equal(await other.localize(remote), torch.ones(100_000))
        assert torch.equal(await client.localize(remote), torch.ones(100_000))
    assert "was written to; it is fetched anew" in caplog.text


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
async def test_r6_every_dtype_comes_back_bit_by_bit(backend: Backend, client: TensorClient) -> None:
    tensors = []
    for name, size in DTYPES:
        octets = torch.arange(7 * 4 * size, dtype=torch.int64).to(torch.uint8)
        whole = (octets % 2 if name == "bool" else octets).view(getattr(torch, name)).reshape(7, 4)
        tensors += [whole, whole[3, 2], whole[:0], whole.t()[1:, ::2], whole[::3]]
    remotes = await store(client, backend.server, *tensors)
    for tensor, remote, back in zip(tensors, remotes, await client.localize(remotes), strict=True):
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape) == (remote.dtype, remote.shape)
        assert (bytes_of(back)[1] == bytes_of(tensor)[1]).all(), tensor.dtype


async def test_r6_conjugated_negated_and_learnt_tensors_keep_values(backend: Backend, client: TensorClient) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    tensors = [value.conj(), value.conj().imag, torch.nn.Parameter(torch.ones(2))]
    local = await client.localize(await store(client, backend.server, *tensors))
    assert [tensor.tolist() for tensor in local] == [[1 - 2j, 3 + 4j], [-2, 4], [1, 1]]
    assert not local[2].requires_grad


async def test_r7_buffer_stays_below_its_limit_over_ten_times_as_much(backend: Backend) -> None:
    async with backend.client(max_bytes=2 * MIB) as client:
        for number, remote in enumerate(await store(client, backend.server, *torch.arange(20).repeat(MIB // 8, 1).t())):
            assert int((await client.localize(remote))[-1]) == number
            now = client.statistics()
            assert now.bytes + now.in_flight_bytes <= 2 * MIB
        assert now.fetched_bytes == 20 * MIB
        assert now.evictions == now.fetched - now.entries >= 18


async def test_r7_tensor_larger_than_the_buffer_is_delivered_not_kept(backend: Backend) -> None:
    async with backend.client(max_bytes=1000) as client:
        [remote] = await store(client, backend.server, torch.ones(1000))
        assert torch.equal(await client.localize(remote), torch.ones(1000))
        assert client.statistics().entries == 0


async def test_r10_a_permanent_failure_is_raised_at_its_index_alone(backend: Backend, client: TensorClient) -> None:
    items = await store(client, backend.server, *(torch.tensor([number]) for number in range(100)))
    await client.clear(backend.server, [items[70].shard_id])
    async with client.ahead(items) as reader:
        for index in range(100):
            if index == 70:
                with pytest.raises(ShardNotFound, match=items[70].shard_id):
                    await anext(reader)
            else:
                assert int(await anext(reader)) == index
        with pytest.raises(StopAsyncIteration):
            await anext(reader)


async def test_r10_unfetchable_item_is_an_error_at_its_index_alone(backend: Backend, client: TensorClient) -> None:
    items = await store(client, backend.server, *(torch.tensor([number]) for number in range(5)))
    items[1] = replace(items[1], dtype_name="none")
    items[3] = replace(items[3], shape=None)  # type: ignore[arg-type]
    async with client.ahead(items) as reader:
        for index in range(5):
            if index in {1, 3}:
                with pytest.raises(TensorError):
                    await anext(reader)
            else:
                assert int(await anext(reader)) == index


@pytest.mark.parametrize("index", [2, -3])
async def test_order_beyond_the_items_is_refused_before_any_fetch(client: TensorClient, index: int) -> None:
    with pytest.raises(ConfigError, match=f"order must hold indices of the 2 items, not {index}"):
        client.ahead([torch.ones(1)] * 2, [0, index])
    with pytest.raises(ConfigError, match="max_bytes must be a whole number, at least 1"):
        client.ahead([torch.ones(1)], max_bytes=index / 2)  # type: ignore[arg-type]


async def test_r16_statistics_account_for_every_byte(backend: Backend) -> None:
    async with backend.client(delivery="view", max_bytes=4 * MIB) as client:
        remotes = await store(client, backend.server, *(torch.full((MIB // 4,), float(number)) for number in range(6)))
        held = await client.localize(remotes[:2])
        now = client.statistics()
        assert (now.entries, now.bytes, now.pinned_bytes, now.in_flight_bytes) == (2, 2 * MIB, 0, 0)
        assert client.clear_all() == 2
        now = client.statistics()
        assert (now.entries, now.bytes, now.pinned_bytes, now.cleared) == (0, 0, 2 * MIB, 2)
        part = held[1][3:5]
        del held
        await _pinned_in_the_end(client, MIB)  # by its part
        for remote in remotes:
            await client.localize(remote)
        now = client.statistics()
        assert (now.bytes, now.evictions, now.hits, now.misses) == (4 * MIB, 2, 0, 8)
        del part
        await _pinned_in_the_end(client, 0)


async def _pinned_in_the_end(client: TensorClient, nbytes: int) -> None:
    """The client's thread lets go of what it handed over a moment after that."""
    gc.collect()
    with anyio.fail_after(5):
        while client.statistics().pinned_bytes != nbytes:  # noqa: ASYNC110 - no event tells it
            await anyio.sleep(0.001)
