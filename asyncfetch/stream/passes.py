"""Passes over a stream: opened on a loop of the caller's, or driven by one in a thread."""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Self

from asyncfetch.runtime import iterate
from asyncfetch.stream.building import JobBuilder
from asyncfetch.stream.jobs import Sizes
from asyncfetch.stream.samples import Delivery, SamplePass

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from asyncfetch.lerobot import LeRobotDataset, Sample
    from asyncfetch.stream.epochs import Turn
    from asyncfetch.stream.placement import Placement
    from asyncfetch.stream.plan import PassPlan
    from asyncfetch.stream.session import Session
    from asyncfetch.stream.state import State
    from asyncfetch.stream.stream import Stream

__all__ = ["Samples", "StreamIterator"]

JOB_BYTES = 16 * 1024 * 1024
"""Decoded by one call in a thread: about eight samples of two 640x480 cameras, some 40 ms. Enough that what a job costs
on the loop (0.3 ms) doesn't count."""
JOB_MAX_SAMPLES = 64
AHEAD_JOBS = 64
"""Decoded ahead at most, beside the samples that wait for their turn: small samples would fill the bound on bytes with
hundreds of thousands, and open a thousand episodes for them. Those of pictures come to that bound first."""
HANDED_OVER_PARCELS = 3
"""Beside those decoded ahead: the consumer's own, and two between the loop and a synchronous consumer."""


class Samples:
    """A pass that isn't open yet; entering it gives the ``SamplePass``."""

    def __init__(
        self,
        stream: Stream,
        opener: Callable[[], AbstractAsyncContextManager[LeRobotDataset]],
        *,
        epoch: int | None,
        placement: Placement,
        plan: PassPlan | None = None,
        is_followed: bool,
    ) -> None:
        """``plan`` is one that was made, and whose end is somebody else's to notice.

        ``is_followed`` says that a pass of the next epoch will find what this one leaves in memory.
        """
        self._stream = stream
        self._opener = opener
        self._epoch = epoch
        self._placement = placement
        self._plan = plan
        self._is_followed = is_followed
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> SamplePass:
        async with AsyncExitStack() as stack:
            dataset = await stack.enter_async_context(self._opener())
            samples = await stack.enter_async_context(self._start(dataset))
            self._stack = stack.pop_all()
        return samples

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def _start(self, dataset: LeRobotDataset) -> SamplePass:
        stream, config = self._stream, dataset.config
        turn = stream.epochs.begin(self._epoch)
        plan = stream.begin(dataset, self._placement, turn.epoch) if self._plan is None else self._plan
        beyond = stream.plan(dataset, self._placement, turn.epoch + 1) if self._is_followed else None
        samples = dataset.sample_builder(stream.windows)
        decoded_samples = config.decoded_max_bytes // samples.sample_bytes
        open_episodes = plan.order.open_episodes(self._placement)
        sizes = Sizes.within(
            decoded_samples,
            group_frames=plan.order.group_frames,
            open_episodes=open_episodes,
            jobs=2 * dataset.decode_pool.threads + HANDED_OVER_PARCELS,  # so that every thread has work
            max_job_samples=max(1, min(JOB_MAX_SAMPLES, JOB_BYTES // samples.sample_bytes)),
        )
        return SamplePass(
            dataset,
            plan,
            builder=JobBuilder(samples, stream.transform, marks_padding=plan.progress.ends == "pad"),
            sizes=sizes,
            max_samples=min(
                decoded_samples - HANDED_OVER_PARCELS * sizes.job_samples,
                sizes.waiting_samples + AHEAD_JOBS * sizes.job_samples,
            ),
            max_episodes=open_episodes + config.prefetch_episodes,
            prefetch_episodes=config.prefetch_episodes,
            on_error=config.on_error,
            quarantine=stream.quarantine,
            beyond=beyond,
            on_end=partial(stream.finish, turn, plan) if self._plan is None else lambda: None,
        )


class StreamIterator:
    """The samples of one pass, driven by a loop in a thread. Closed, collected or at its end, it stops everything."""

    def __init__(
        self,
        stream: Stream,
        session: Session,
        dataset: LeRobotDataset,
        placement: Placement,
        begin: Callable[[], Turn],
        *,
        is_followed: bool,
    ) -> None:
        self._stream, self._dataset, self._placement = stream, dataset, placement
        self._plans: list[PassPlan] = []  # one, from the first sample on
        # No method of this object: it must be collected, and the pass with it, as soon as nobody iterates it any more.
        self._deliveries = _deliver(stream, session, dataset, placement, begin, self._plans, is_followed=is_followed)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Sample:
        delivered, sample = next(self._deliveries)
        self._plans[0].progress.delivered = delivered
        return sample

    def __length_hint__(self) -> int:
        """Samples that are yet to come at most, padding included; 0 before the first."""
        return sum(len(plan) - (plan.progress.delivered - plan.begun) for plan in self._plans)

    def state_dict(self) -> State:
        """What this pass, and those before it, have delivered of the epoch: for ``Stream.load_state_dict``."""
        plan = self._plans[0] if self._plans else self._stream.plan(self._dataset, self._placement, self._stream.epoch)
        return plan.progress.state()

    def close(self) -> None:
        """Stop, as an early ``break`` does."""
        self._deliveries.close()


def _deliver(
    stream: Stream,
    session: Session,
    dataset: LeRobotDataset,
    placement: Placement,
    begin: Callable[[], Turn],
    plans: list[PassPlan],
    *,
    is_followed: bool,
) -> Generator[Delivery, None, None]:
    turn = begin()
    plan = stream.begin(dataset, placement, turn.epoch)
    plans.append(plan)
    # The pass itself is ahead of the consumer, so it doesn't count the epoch.
    opened = Samples(
        stream,
        lambda: nullcontext(dataset),
        epoch=turn.epoch,
        placement=placement,
        plan=plan,
        is_followed=is_followed,
    )
    yield from iterate(session.thread, partial(_Parcels, opened), times=session.hand_over)
    stream.finish(turn, plan)


class _Parcels:
    """A pass as an async iterator of lists, for ``runtime.iterate``."""

    def __init__(self, opened: Samples) -> None:
        self._opened = opened

    async def __aenter__(self) -> Self:
        self._samples = await self._opened.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._opened.__aexit__(kind, error, at)

    def __aiter__(self) -> _Parcels:
        return self

    async def __anext__(self) -> list[Delivery]:
        return await self._samples.next_parcel()
