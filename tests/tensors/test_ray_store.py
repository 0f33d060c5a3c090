"""What only Ray does: other processes, owners that die, memory that is freed; what only one of two stores does."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncfetch.errors import ConfigError, ConnectionFailed, ShardNotFound
from asyncfetch.tensors import RemoteTensor, TensorClient, TensorServer
from asyncfetch.tensors.ray_store import NAME, NAMESPACE, RAY
from bench.tensors import measure_steps
from tests.tensors.conftest import MIB, Backend

if TYPE_CHECKING:
    from collections.abc import Callable

ray_client, http_client = Backend("ray", RAY).client, Backend("http", "").client
pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]  # a worker of Ray's imports torch


async def in_worker(function: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
    """What the function returns in a process of Ray's own."""
    import ray

    def call() -> Any:  # noqa: ANN401
        return ray.get(ray.remote(max_calls=1)(function).remote(*arguments), timeout=50)

    return await anyio.to_thread.run_sync(call)


async def test_another_process_reads_and_clears() -> None:
    def work(remote: RemoteTensor) -> tuple[int, int]:
        with TensorClient() as client:
            total = int(client.localize(remote).sum())
            return total, client.clear(remote.server, [remote.shard_id]).remote

    async with ray_client() as client:
        remote = await client.remotize(torch.arange(100_000), None)
        assert remote.server == RAY
        assert await in_worker(work, remote) == (sum(range(100_000)), 1)
        with pytest.raises(ShardNotFound, match=remote.shard_id):
            await client.localize(remote)


async def test_tensors_of_a_killed_process_are_lost() -> None:
    def work() -> tuple[RemoteTensor, int]:
        with TensorClient() as client:
            return client.remotize(torch.ones(1_000_000)), os.getpid()

    remote, pid = await in_worker(work)
    os.kill(pid, signal.SIGKILL)
    async with ray_client(max_bytes=0) as client:
        with anyio.fail_after(30), pytest.raises(ShardNotFound, match=remote.shard_id):
            await localize_until_ray_has_noticed(client, remote)


async def localize_until_ray_has_noticed(client: TensorClient, remote: RemoteTensor) -> None:
    """Ray says that it killed something a little before that is so."""
    while True:
        await client.localize(remote)


async def test_store_that_lost_its_directory_starts_afresh() -> None:
    import ray

    async with ray_client(max_bytes=0) as client:
        remote = await client.remotize(torch.ones(3))
        directory = ray.get_actor(NAME, NAMESPACE)
        await anyio.to_thread.run_sync(ray.kill, directory)
        with anyio.fail_after(30), pytest.raises(ConnectionFailed, match="Ray can't keep or give"):
            await localize_until_ray_has_noticed(client, remote)
        with pytest.raises(ShardNotFound, match=remote.shard_id):
            await client.localize(remote)
        assert torch.equal(await client.localize(await client.remotize(torch.ones(3))), torch.ones(3))


async def test_steps_of_put_localize_clear_take_no_memory_on_any_side() -> None:
    steps = await measure_steps(150, "ray")
    assert steps.kept_bytes == 0
    for early, late in (steps.client_bytes, steps.server_bytes):
        assert late - early < 24 * MIB  # a step's tensors are 0.6 MiB: kept, they were 50 more by then


async def test_a_clear_frees_the_object_stores_memory() -> None:
    import ray

    def free_bytes() -> float:
        resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        return resources["object_store_memory"]

    async with ray_client(max_bytes=0) as client:
        for _ in range(12):  # 12 times 40 MiB; the object store has 200
            remote = await client.remotize(torch.ones(10 * MIB), None)
            await client.localize(remote)
            await client.clear(RAY, [remote.shard_id])
            gc.collect()
        with anyio.fail_after(10):
            while await anyio.to_thread.run_sync(free_bytes) < 150 * MIB:  # noqa: ASYNC110 - Ray's own pace
                await anyio.sleep(0.1)


async def test_ray_is_chosen_where_it_is_initialised(server: TensorServer) -> None:
    async with TensorClient() as client:
        remote = await client.remotize(torch.ones(3), server.url)
        assert remote.server == RAY
        assert torch.equal(await client.localize(remote), torch.ones(3))
        await client.clear(RAY, [remote.shard_id])
    assert server.statistics().stored == 0


async def test_structure_may_be_in_both_stores(server: TensorServer) -> None:
    async with ray_client() as by_ray, http_client() as by_http:
        mixed = [await by_ray.remotize(torch.ones(3)), await by_http.remotize(torch.zeros(2), server.url)]
        assert set(by_http.collect_shards(mixed)) == {RAY, server.url}
        assert [tensor.tolist() for tensor in await by_http.localize(mixed)] == [[1, 1, 1], [0, 0]]
        await by_http.clear(RAY, [mixed[0].shard_id])


async def test_http_needs_a_server() -> None:
    async with http_client() as client:
        with pytest.raises(ConfigError, match="url of a TensorServer"):
            await client.remotize(torch.ones(1))


async def test_ray_is_not_started_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    async with ray_client() as client:
        remote = await client.remotize(torch.ones(3))
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        for call in (
            partial(client.localize, remote),
            partial(client.remotize, torch.ones(3)),
            partial(client.clear, RAY, [remote.shard_id]),
        ):
            with pytest.raises(ConfigError, match=r"ray\.init\(\)"):
                await call()


def test_usage_reports_of_ray_are_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray._common.usage import usage_lib

    assert not usage_lib.usage_stats_enabled()
