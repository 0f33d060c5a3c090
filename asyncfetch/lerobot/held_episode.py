"""A stretch of an episode while it is read: its rows, its clips and their decoders."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from asyncfetch.decode import open_decoder
from asyncfetch.errors import ClosedError, DatasetError, DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import torch

    from asyncfetch.cache import Lease
    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import Clip, FrameDecoder, PictureSize
    from asyncfetch.lerobot.engine import DatasetEngine
    from asyncfetch.lerobot.episode_table import Episode
    from asyncfetch.lerobot.rows import EpisodeRows
    from asyncfetch.lerobot.stretch import Stretch

READERS = 4
"""Number of a stretch's readers that have decoders of their own; further ones share these, also where earlier ones
are through."""


@dataclass(slots=True, eq=False)
class EpisodeEntry:
    """A stretch that is read or waited for."""

    episode: Episode
    stretch: Stretch
    holders: int = 0
    passes: int = 0
    """Holders that are passes."""
    size_bytes: int | None = None
    """Room that is taken for its clips; None before, and where they are in common memory."""
    is_common: bool = False
    """True where its clips are in memory of all loader workers of the rank."""
    generation: int = 0
    rows: EpisodeRows | None = None
    """Rows of the whole episode, with pictures of the stretch; None until all is in memory."""
    clips: Mapping[str, Clip] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)


class ClipDecoders:
    """The decoders of one dataset's clips in memory. ``decoder`` and ``doubt`` are thread-safe.

    Args:
        engine: Keeps the decoders, within its bounds.
        number: Of the dataset in the engine.
        backend: The library that decodes.
        size: What pictures are brought to.
    """

    def __init__(
        self, engine: DatasetEngine, number: int, backend: DecoderBackend, size: PictureSize | None = None
    ) -> None:
        self._kept, self._keys = engine.decoders, engine.decoder_keys
        self._number = number
        self._backend: DecoderBackend = backend
        self._size = size
        self._doubted: set[int] = set()
        self.generation = 0
        """The number of times that a file was found replaced."""

    def decoder(self, entry: EpisodeEntry, camera: str, frames: Sequence[int], reader: int) -> FrameDecoder:
        """Return a reader's decoder of a held clip, for these frames: a kept one, or a new one."""
        clip, lease = entry.clips[camera], entry.leases[camera]

        def open_clip() -> FrameDecoder:
            clip.ranks(frames)  # a video without any of the frames is no video that a decoder would open
            return open_decoder(clip, backend=self._backend, size=self._size)

        if entry.generation != self.generation:
            return open_clip()  # not kept: the replaced video won't be read again
        # Stretches of one group of pictures may have the same bytes, and other frames in them.
        key = (self._number, lease.key, entry.stretch, entry.generation, reader % READERS)
        self._keys.setdefault(lease.key, set()).add(key)  # while the lease holds the clip
        return self._kept.get(key, open_clip)

    def doubt(self, stretch: Stretch) -> None:
        """Note that frames of a stretch couldn't be read: its episode is planned anew when it is held next."""
        self._doubted.add(stretch.episode)

    def take_doubt(self, episode: int) -> bool:
        """Return whether an episode is doubted, once for each time that it is."""
        is_doubted = episode in self._doubted
        self._doubted.discard(episode)
        return is_doubted

    def replace_all(self) -> None:
        """Close the decoders, and keep none of those clips that are in memory now: a file was replaced."""
        self.generation += 1
        self._kept.clear()


class HeldEpisode:
    """A stretch of an episode, or all of it, that can be read until it is released.

    Release it exactly once, or use it as a context manager. ``rows`` and ``frames`` may be used from any thread; frames
    are numbered in the episode.
    """

    def __init__(
        self,
        entry: EpisodeEntry,
        decoders: ClipDecoders,
        release: Callable[[EpisodeEntry, bool], None],
        *,
        by_pass: bool = False,
    ) -> None:
        self._entry, self._decoders, self._release = entry, decoders, release
        self.is_by_pass = by_pass
        """True if a pass has claimed it."""
        self._released = False
        entry.holders += 1
        entry.passes += by_pass

    @property
    def entry(self) -> EpisodeEntry:
        """The cache's entry that it holds."""
        return self._entry

    @property
    def episode(self) -> Episode:
        """The episode as the metadata has it."""
        return self._entry.episode

    @property
    def stretch(self) -> Stretch:
        """The frames that samples can be made of."""
        return self._entry.stretch

    @property
    def is_common(self) -> bool:
        """True where its clips are in memory of all loader workers of the rank, and take no room here."""
        return self._entry.is_common

    @property
    def rows(self) -> EpisodeRows:
        """The table rows of its episode, by feature; pictures, for frames that the stretch's samples need."""
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
            frames: Of those that the stretch's samples need, in any order.
            reader: Each of the first few (``READERS``) has a decoder of its own, which goes on where it
                stopped; so two that go through different groups of pictures in turns don't begin theirs anew each time.

        Raises:
            FrameMissing: The video has no such frame.
            DecodeError: The bytes can't be decoded.
        """
        with self._decoder(camera, frames, reader) as decoder:
            return decoder.frames(frames)

    def each(self, camera: str, frames: Sequence[int], *, reader: int = 0) -> list[torch.Tensor]:
        """See ``frames``; duplicates are one tensor."""
        with self._decoder(camera, frames, reader) as decoder:
            return decoder.each(frames)

    def give(
        self, camera: str, frames: Sequence[int], take: Callable[[int, torch.Tensor], None], *, reader: int = 0
    ) -> None:
        """See ``frames``; each is given by ``take(place in frames, picture)`` as soon as it is decoded."""
        with self._decoder(camera, frames, reader) as decoder:
            decoder.give(frames, take)

    @contextmanager
    def _decoder(self, camera: str, frames: Sequence[int], reader: int) -> Iterator[FrameDecoder]:
        self._check()
        stretch, length = self.stretch, self.episode.length
        start, stop = stretch.span(camera, length)
        for frame in frames:
            if not start <= frame < stop and 0 <= frame < length:
                name = stretch.name(length)
                raise AssertionError(f"{name}: frame {frame} of {camera}, of which it holds [{start}, {stop})")
        try:
            yield self._decoders.decoder(self._entry, camera, frames, reader)
        except (DatasetError, DecodeError):
            self._decoders.doubt(stretch)
            raise

    def release(self) -> None:
        """Let go of its bytes. Call it on the loop."""
        if not self._released:
            self._released = True
            self._release(self._entry, self.is_by_pass)

    def _check(self) -> None:
        if self._released:
            raise ClosedError(f"{self.stretch.name(self.episode.length)} was released: hold it again to read it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
