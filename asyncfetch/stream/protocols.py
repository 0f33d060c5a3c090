"""Protocols of what is open and of who reads it for a pass, and the origin of an episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncfetch.config import StreamConfig
    from asyncfetch.decode import DecodePool
    from asyncfetch.lerobot import DatasetStatistics, HeldEpisode, LeRobotDataset
    from asyncfetch.lerobot.engine import Budget
    from asyncfetch.observe.report import Report

__all__ = ["Opened", "Origin", "Readable"]


class Origin(NamedTuple):
    """The origin of an episode of a pass."""

    dataset: LeRobotDataset
    episode: int
    """Its index there."""
    member: int = 0
    """The member of a mixture."""


class Opened(Protocol):
    """An open dataset, or those of a mixture: what plans are made of."""

    def statistics(self) -> DatasetStatistics:
        """A snapshot."""
        ...


class Readable(Protocol):
    """Reader of what is open, for a pass. Episodes are those that its plans name."""

    config: StreamConfig
    pass_report: Callable[[], Report] | None
    """Gives the report of the latest pass over it."""

    @property
    def clip_budget(self) -> Budget:
        """The budget from which passes over it pay for clips."""
        ...

    @property
    def decode_pool(self) -> DecodePool:
        """The threads that it decodes in."""
        ...

    def prefetch(self, episode: int) -> None:
        """See EpisodeReader, as for the others."""
        ...

    async def ready(self, episode: int) -> None:
        """Wait until an episode is in memory, as long as there is room for it."""
        ...

    def raise_priority(self, episode: int) -> None:
        """Somebody waits now for an episode that was read ahead."""
        ...

    async def clip_bytes(self, episode: int) -> int:
        """Memory that its clips take."""
        ...

    async def locate_rows(self, episode: int) -> None:
        """Bring what ``hold`` needs to know of its rows."""
        ...

    async def hold(self, episode: int) -> HeldEpisode:
        """The episode in memory until it is released, for who has paid for it; PlanChange where it weighs other."""
        ...

    async def hold_common(self, episode: int) -> HeldEpisode | None:
        """The same in memory that loader workers share, unpaid; None where there is none, or no room in it."""
        ...

    def statistics(self) -> DatasetStatistics:
        """A snapshot."""
        ...
