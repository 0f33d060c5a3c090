"""An episode in memory, for whoever reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from asyncfetch.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    import torch

    from asyncfetch.cache import Lease
    from asyncfetch.decode import Clip
    from asyncfetch.lerobot.episode_cache import EpisodeCache
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.rows import EpisodeRows

__all__ = ["EpisodeEntry", "HeldEpisode"]


@dataclass(slots=True, eq=False)
class EpisodeEntry:
    """An episode that somebody reads or waits for."""

    episode: Episode
    holders: int = 0
    paid_holders: int = 0
    generation: int = 0
    rows: EpisodeRows | None = None
    """None until it is all in memory."""
    clips: Mapping[str, Clip] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)


class HeldEpisode:
    """An episode that can be read until it is released; release it exactly once, or use it as a context manager.

    ``rows`` and ``frames`` may be used from any thread.
    """

    def __init__(self, cache: EpisodeCache, entry: EpisodeEntry, *, paid: bool) -> None:
        self._cache = cache
        self._entry = entry
        self._paid = paid
        self._released = False
        entry.holders += 1
        entry.paid_holders += paid

    @property
    def episode(self) -> Episode:
        """What the metadata says of it."""
        return self._entry.episode

    @property
    def rows(self) -> EpisodeRows:
        """Its table rows, by feature."""
        self._check()
        assert self._entry.rows is not None
        return self._entry.rows

    def clip(self, camera: str) -> Clip:
        """The bytes of one camera's frames as a small MP4 in memory, for a decoder of your own."""
        self._check()
        return self._entry.clips[camera]

    def frames(self, camera: str, frames: Sequence[int], *, reader: int = 0) -> torch.Tensor:
        """Decoded frames of one camera, (len(frames), C, H, W). Takes a while: call it in a thread.

        Args:
            camera: Its feature.
            frames: Of the episode, from 0, in any order.
            reader: Each of the first few (``EpisodeCache.READERS``) has a decoder of its own, which goes on where it
                stopped; so two who go through different groups of pictures in turns don't begin theirs anew each time.

        Raises:
            FrameMissing: The video has no such frame.
            DecodeError: The bytes can't be decoded.
        """
        self._check()
        return self._cache.decoder(self._entry, camera, frames, reader).frames(frames)

    def each(self, camera: str, frames: Sequence[int], *, reader: int = 0) -> list[torch.Tensor]:
        """See ``frames``; duplicates are one tensor."""
        self._check()
        return self._cache.decoder(self._entry, camera, frames, reader).each(frames)

    def give(
        self, camera: str, frames: Sequence[int], take: Callable[[int, torch.Tensor], None], *, reader: int = 0
    ) -> None:
        """See ``frames``; each is given by ``take(place in frames, picture)`` as soon as it is decoded."""
        self._check()
        self._cache.decoder(self._entry, camera, frames, reader).give(frames, take)

    def release(self) -> None:
        """Let go of its bytes. Call it on the loop."""
        if not self._released:
            self._released = True
            self._entry.paid_holders -= self._paid
            self._cache.release(self._entry)

    def _check(self) -> None:
        if self._released:
            raise ClosedError(f"episode {self._entry.episode.index} was released: hold it again to read it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
