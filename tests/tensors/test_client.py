"""What every back end does: the same suite over HTTP and over a real Ray."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections import OrderedDict, namedtuple
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncfetch.errors import ClosedError, ConfigError, ShardNotFound, TensorError
from asyncfetch.tensors import Cleared, RemoteTensor, TensorClient
from tests.tensors.conftest import http_client, store

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.tensors import TensorServer
    from tests.tensors.conftest import Backend


@dataclasses.dataclass(frozen=True)
class Rollout:
    tokens: Any
    reward: float


class Couple(tuple[Any, Any]):
    __slots__ = ()

    def __new__(cls, first: Any, second: Any) -> Self:  # noqa: ANN401
        return super().__new__(cls, (first, second))


class Fixed(dict[str, Any]):
    error: type[Exception] = TypeError

    def __setitem__(self, key: str, value: Any) -> None:  # noqa: ANN401
        raise self.error("it is fixed")


class Checked(Fixed):
    error = ValueError


class Without(torch.Tensor):
    def untyped_storage(self) -> Any:  # noqa: ANN401
        raise TypeError("it has none")


Pair = namedtuple("Pair", ["first", "second"])  # noqa: PYI024 - what users have


async def test_a_structure_comes_back_as_it_was(backend: Backend, client: TensorClient) -> None:
    label = object()
    obj = {
        "rollout": Rollout(torch.arange(6).reshape(2, 3), 0.5),
        "pair": Pair(torch.ones(3), "text"),
        "list": [None, 3, (torch.zeros(1000, 1000), label)],
        "ordered": OrderedDict(a=torch.tensor(7)),
        "empty": {},
    }
    remote = await client.remotize(obj, backend.server)
    assert isinstance(remote["rollout"], Rollout)
    assert isinstance(remote["rollout"].tokens, RemoteTensor)
    assert remote["list"][2][1] is label
    async with backend.client() as other:
        local = await other.localize(remote)
    assert list(local) == list(obj)
    assert torch.equal(local["rollout"].tokens, obj["rollout"].tokens)  # type: ignore[attr-defined]
    assert isinstance(local["pair"], Pair)
    assert torch.equal(local["pair"].first, torch.ones(3))
    assert torch.equal(local["list"][2][0], torch.zeros(1000, 1000))
    assert type(local["ordered"]) is OrderedDict
    assert local["ordered"]["a"] == 7
    assert local["empty"] is obj["empty"]


async def test_a_remote_tensor_is_small_and_pickles(backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.zeros(3, 1000, dtype=torch.bfloat16))
    pickled = pickle.dumps(remote)
    assert len(pickled) < 400
    assert pickle.loads(pickled) == remote
    assert (remote.shape, remote.dtype, remote.ndim, remote.nbytes) == ((3, 1000), torch.bfloat16, 2, 6000)
    assert remote.device == torch.device("cpu")


async def test_a_thousand_asks_of_one_shard_are_one_fetch(backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.arange(100_000))
    sums = []

    async def ask() -> None:
        sums.append(int((await client.localize(remote)).sum()))

    async with backend.client(delivery="view") as client, anyio.create_task_group() as tasks:
        for _ in range(1000):
            tasks.start_soon(ask)
    assert sums == [sum(range(100_000))] * 1000
    assert client.statistics().fetched == 1


async def test_threads_and_tasks_share_a_fetch(backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.arange(1_000_000))
    together = threading.Barrier(8)

    def ask() -> torch.Tensor:
        together.wait()
        tensor: torch.Tensor = client.blocking.localize(remote)
        return tensor

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(anyio.to_thread.run_sync, ask)
    assert client.statistics().fetched == 1


async def test_event_loops_share_a_client(backend: Backend, client: TensorClient) -> None:
    remotes = await store(client, backend.server, torch.arange(100_000), torch.ones(3))
    together = threading.Barrier(3)

    def ask() -> int:
        together.wait()
        local = anyio.run(client.localize, remotes)
        return int(local[0].sum())

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(anyio.to_thread.run_sync, ask)
    assert client.statistics().fetched == 2
    assert torch.equal((await client.localize(remotes))[1], torch.ones(3))


async def test_a_second_localize_sends_no_request(backend: Backend, client: TensorClient) -> None:
    remotes = await store(client, backend.server, torch.ones(3), torch.zeros(100_000))
    await client.localize(remotes)
    before = client.statistics()
    await client.localize(remotes)
    after = client.statistics()
    assert (after.requests, after.fetched) == (before.requests, before.fetched)
    assert after.hits == before.hits + 2


async def test_partial_hits_fetch_only_misses(backend: Backend, client: TensorClient) -> None:
    remotes = await store(client, backend.server, *(torch.full((10,), number) for number in range(5)))
    await client.localize(remotes[1:3])
    local = await client.localize(remotes)
    assert [int(tensor[0]) for tensor in local] == [0, 1, 2, 3, 4]
    assert client.statistics().fetched == 5


async def test_missing_ids_are_named_in_one_error_and_others_kept(backend: Backend, client: TensorClient) -> None:
    remotes = await store(
        client, backend.server, *(torch.full((10,), number) for number in range(5)), torch.ones(200_000)
    )
    gone = [remotes[1].shard_id, remotes[3].shard_id, remotes[5].shard_id]
    await client.clear(backend.server, gone)
    with pytest.raises(ShardNotFound) as caught:
        await client.localize(remotes)
    assert set(caught.value.shard_ids) == set(gone)
    assert all(shard_id in str(caught.value) for shard_id in gone)
    assert client.statistics().entries == 3
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), KeyError)


async def test_the_same_shards_again_after_one_was_cleared(backend: Backend, client: TensorClient) -> None:
    remotes = await store(client, backend.server, *(torch.full((10,), number) for number in range(5)))
    await client.localize(remotes)
    await client.clear(backend.server, [remotes[1].shard_id])
    client.clear_all()
    with pytest.raises(ShardNotFound, match=remotes[1].shard_id):
        await client.localize(remotes)


async def test_clear_counts_both_sides(backend: Backend, client: TensorClient) -> None:
    remotes = await store(client, backend.server, torch.ones(3), torch.ones(4))
    await client.localize(remotes[0])
    [(node, ids)] = client.collect_shards(remotes).items()
    assert await client.clear(node, ids) == Cleared(local=1, remote=2)
    assert await client.clear(node, ids) == Cleared(local=0, remote=0)
    assert await client.clear(node, []) == Cleared(local=0, remote=0)


async def test_clear_all_is_local(backend: Backend, client: TensorClient) -> None:
    remotes = await store(client, backend.server, torch.ones(3), torch.ones(4))
    await client.localize(remotes)
    assert client.clear_all() == 2
    assert client.statistics().entries == 0
    await client.localize(remotes)


async def test_a_cleared_shard_isnt_given_to_who_asks_afterwards(backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.ones(500_000))

    async def ask_before() -> None:
        with suppress(ShardNotFound):  # the clear may overtake it on the way
            assert torch.equal(await client.localize(remote), torch.ones(500_000))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask_before)
        await anyio.lowlevel.checkpoint()
        await client.clear(backend.server, [remote.shard_id])
        with pytest.raises(ShardNotFound):
            await client.localize(remote)
    assert client.statistics().entries == 0


async def test_shards_are_collected_by_server_each_once(backend: Backend, client: TensorClient) -> None:
    first, second = await store(client, backend.server, torch.ones(3), torch.ones(4))
    collected = client.collect_shards({"a": [second, first, second], "b": 3})
    assert list(collected.values()) == [[second.shard_id, first.shard_id]]


async def test_to_local_takes_either(backend: Backend, client: TensorClient) -> None:
    [remote] = await store(client, backend.server, torch.ones(3))
    assert torch.equal(await client.to_local(remote), torch.ones(3))
    tensor = torch.ones(2)
    assert await client.to_local(tensor) is tensor


async def test_remote_tensors_may_be_stored_again(backend: Backend, client: TensorClient) -> None:
    obj = await client.remotize({"a": torch.ones(3)}, backend.server)
    assert await client.remotize(obj, backend.server) == obj


async def test_padding_is_left_out_on_request(backend: Backend, client: TensorClient) -> None:
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]])
    batch = {"attention_mask": mask, "ids": torch.arange(10).reshape(2, 5), "logits": torch.ones(2, 5, 7)}
    batch["lengths"] = torch.tensor([2, 3])
    remote = await client.remotize([batch], backend.server, unpad=True)
    local = (await client.localize(remote))[0]
    assert {key: tuple(tensor.shape) for key, tensor in local.items()} == {
        "attention_mask": (2, 3),
        "ids": (2, 3),
        "logits": (2, 3, 7),
        "lengths": (2,),
    }
    assert torch.equal(local["ids"], batch["ids"][:, :3])
    assert (await client.remotize(batch, backend.server))["ids"].shape == (2, 5)


async def test_a_mask_of_numpy_leaves_padding_out_as_well(backend: Backend, client: TensorClient) -> None:
    for mask in (np.array([[1, 1, 0], [1, 0, 0]]), np.array([[[0, 0], [0, 1], [0, 0]]] * 2), np.zeros((2, 3))):
        for one in (mask, torch.from_numpy(mask)):
            batch = {"attention_mask": one, "ids": torch.arange(6).reshape(2, 3)}
            remote = await client.remotize(batch, backend.server, unpad=True)
            columns = 2 if mask.any() else 0
            assert remote["attention_mask"].shape == one[:, :columns].shape
            assert remote["ids"].shape == (2, columns)


async def test_a_batch_without_rows_has_no_padding_to_keep(backend: Backend, client: TensorClient) -> None:
    remote = await client.remotize({"attention_mask": torch.ones(0, 3)}, backend.server, unpad=True)
    assert remote["attention_mask"].shape == (0, 0)


def test_plain_calls(backend: Backend) -> None:
    with backend.client() as client:
        remote = client.remotize([torch.ones(3)], backend.server)
        assert torch.equal(client.localize(remote)[0], torch.ones(3))
        assert torch.equal(client.to_local(remote[0]), torch.ones(3))
        [(node, ids)] = client.collect_shards(remote).items()
        assert client.clear(node, ids) == Cleared(1, 1)
        assert client.clear_all() == 0
        assert client.statistics().fetched == 1


async def test_put_localize_clear_leaves_nothing(backend: Backend, client: TensorClient) -> None:
    for step in range(50):
        remotes = await store(client, backend.server, torch.full((50_000,), step), torch.full((10,), step))
        assert int((await client.localize(remotes))[0][0]) == step
        await client.clear(backend.server, [remote.shard_id for remote in remotes])
    now = client.statistics()
    assert (now.entries, now.bytes, now.in_flight, now.in_flight_bytes, now.pinned_bytes) == (0, 0, 0, 0, 0)


async def test_object_without_tensors_costs_no_request(backend: Backend, client: TensorClient) -> None:
    obj = {"a": [1, 2], "b": "text"}
    assert await client.remotize(obj, backend.server) is obj
    assert await client.localize(obj) is obj
    assert client.statistics().requests == 0


def shrunk() -> torch.Tensor:
    tensor = torch.ones(1000)[10:]
    tensor.untyped_storage().resize_(999 * 4)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(3, device="meta"), "dense tensors"),
        (lambda: torch.ones(3).to_sparse(), "dense tensors"),
        (shrunk, "storage was freed"),
        (fake, "bytes of a FakeTensor, so it"),
        (lambda: torch._efficientzerotensor(3), "ZeroTensor"),
        (lambda: torch.nn.LazyLinear(3).weight, "bytes of a UninitializedParameter, so it"),
        (Without, "bytes of a Without, so it"),
    ],
    ids=["meta", "sparse", "shrunk", "fake", "zero", "lazy", "without"],
)
async def test_tensor_that_cannot_be_stored_is_refused(
    backend: Backend, client: TensorClient, make: Callable[[], torch.Tensor], said: str
) -> None:
    with pytest.raises(TensorError, match=said):
        await client.remotize(make(), backend.server)


async def test_container_that_cant_be_made_anew_is_refused(server: TensorServer) -> None:
    async with http_client() as client:
        refused = (Couple(torch.ones(1), 2), Fixed(a=torch.ones(1)), Checked(a=torch.ones(1)))
        for obj in refused:
            with pytest.raises(TensorError, match=f"{type(obj).__name__} can't be made anew"):
                await client.remotize([torch.ones(1), obj], server.url)
        assert client.statistics().stored == 2 * len(refused)
        assert server.statistics().shards == 0


async def test_a_structure_that_holds_itself_is_refused(backend: Backend, client: TensorClient) -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(TensorError, match="holds itself"):
        await client.remotize(endless, backend.server)


async def test_client_is_used_within_its_block(backend: Backend) -> None:
    client = backend.client()
    with pytest.raises(ClosedError):
        await client.localize([])
    async with client:
        pass
    with pytest.raises(ClosedError):
        await client.localize([])
    with pytest.raises(ClosedError):
        async with client:
            pass


@pytest.mark.parametrize("ids", [["../../etc"], ["A" * 32], [""], [5], [[]], [RemoteTensor("", "0" * 32, (), "int8")]])
async def test_ids_are_checked(backend: Backend, client: TensorClient, ids: list[Any]) -> None:
    with pytest.raises(ConfigError, match="no shard's id"):
        await client.clear(backend.server, ids)


@pytest.mark.parametrize("wrong", [5, None, b"http://127.0.0.1:80"])
async def test_a_server_is_named_by_a_string(wrong: Any) -> None:  # noqa: ANN401
    async with http_client() as client:
        with pytest.raises(ConfigError):
            await client.remotize(torch.ones(1), wrong)
        with pytest.raises(ConfigError, match="must be a string"):
            await client.clear(wrong, [])
