"""A stretch of an episode while it is read: its bytes, its clips and their decoders."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from asyncfetch.decode import open_decoder
from asyncfetch.errors import ClosedError, DatasetError, DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    import torch

    from asyncfetch.cache import Lease
    from asyncfetch.config import DecoderBackend
    from asyncfetch.decode import Clip, FrameDecoder, PictureSize
    from asyncfetch.formats.stretch import Stretch
    from asyncfetch.resources import Engine

READERS = 4
"""Number of a stretch's readers that have decoders of their own; further ones share these, also where earlier ones
are through."""

X = TypeVar("X")


@dataclass(slots=True, eq=False)
class StretchEntry(Generic[X]):
    """A stretch that is read or waited for."""

    stretch: Stretch
    name_of: Callable[[Stretch], str]
    """Gives a stretch's name in messages."""
    holders: int = 0
    passes: int = 0
    """Holders that are passes."""
    size_bytes: int | None = None
    """Room that is taken for its bytes; None before, and where they are in common memory."""
    is_common: bool = False
    """True where its bytes are in memory of all loader workers of the rank."""
    generation: int = 0
    beside: X | None = None
    """The part that the format has beside its bytes; None until all is in memory."""
    planned: Mapping[str, Any] = field(default_factory=dict)
    """The plan that its bytes were fetched by."""
    clips: Mapping[str, Clip] = field(default_factory=dict)
    leases: Mapping[str, Lease] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.name_of(self.stretch)


class ClipDecoders:
    """The decoders of one dataset's clips in memory. ``decoder`` and ``doubt`` are thread-safe.

    Args:
        engine: Keeps the decoders, within its bounds.
        number: Of the dataset in the engine.
        backend: The library that decodes.
        size: Size that pictures are brought to.
    """

    def __init__(
        self, engine: Engine, number: int, *, backend: DecoderBackend, size: PictureSize | None = None
    ) -> None:
        self._kept, self._keys = engine.decoders, engine.decoder_keys
        self._number = number
        self._backend: DecoderBackend = backend
        self._size = size
        self._doubted: set[int] = set()
        self.generation = 0
        """The number of times that a file was found replaced."""

    def decoder(self, entry: StretchEntry[Any], camera: str, frames: Sequence[int], reader: int) -> FrameDecoder:
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


class HeldStretch(Generic[X]):
    """A stretch of an episode, or all of it, that can be read until it is released.

    Release it exactly once, or use it as a context manager. What it gives may be read from any thread.
    """

    def __init__(
        self,
        entry: StretchEntry[X],
        decoders: ClipDecoders,
        release: Callable[[StretchEntry[X], bool], None],
        *,
        by_pass: bool = False,
    ) -> None:
        self.entry = entry
        """The cache's entry that it holds."""
        self.stretch = entry.stretch
        """The frames that samples can be made of."""
        self._decoders, self._release = decoders, release
        self.is_by_pass = by_pass
        """True if a pass has claimed it."""
        self._released = False
        entry.holders += 1
        entry.passes += by_pass

    @property
    def is_common(self) -> bool:
        """True where its bytes are in memory of all loader workers of the rank, and take no room here."""
        return self.entry.is_common

    @property
    def beside(self) -> X:
        """The part that its format has beside its bytes."""
        self._check()
        assert self.entry.beside is not None
        return self.entry.beside

    def data(self, name: str) -> memoryview:
        """The bytes that were planned under this name, behind their header. Don't write to them."""
        self._check()
        return self.entry.leases[name].buffer

    def clip(self, camera: str) -> Clip:
        """The bytes of one camera's frames as a small MP4 in memory, for a decoder of your own."""
        self._check()
        return self.entry.clips[camera]

    def frames(self, camera: str, frames: Sequence[int], *, reader: int = 0) -> torch.Tensor:
        """Decoded frames of one camera, (len(frames), C, H, W). Takes a while: call it in a thread.

        Args:
            camera: Its name.
            frames: Of those that the stretch's samples need, in any order.
            reader: Each of the first few (``READERS``) has a decoder of its own, which goes on where it
                stopped; so two that go through different groups of pictures in turns don't begin theirs anew each time.

        Raises:
            FrameMissing: The video has no such frame.
            DecodeError: The bytes can't be decoded.
        """
        with self.decoding(camera, frames, reader) as decoder:
            return decoder.frames(frames)

    def each(self, camera: str, frames: Sequence[int], *, reader: int = 0) -> list[torch.Tensor]:
        """The same as ``frames``, in a list; duplicates are one tensor."""
        with self.decoding(camera, frames, reader) as decoder:
            return decoder.each(frames)

    def give(
        self, camera: str, frames: Sequence[int], take: Callable[[int, torch.Tensor], None], *, reader: int = 0
    ) -> None:
        """Decode the same as ``frames``: ``take(place in frames, picture)`` is called as soon as each is there."""
        with self.decoding(camera, frames, reader) as decoder:
            decoder.give(frames, take)

    @contextmanager
    def decoding(self, camera: str, frames: Sequence[int], reader: int) -> Iterator[FrameDecoder]:
        """A decoder of one camera for these frames, for a block. An error of the data casts doubt on the stretch."""
        self._check()
        try:
            yield self._decoders.decoder(self.entry, camera, frames, reader)
        except (DatasetError, DecodeError):
            self._decoders.doubt(self.stretch)
            raise

    def release(self) -> None:
        """Let go of its bytes. Call it on the loop."""
        if not self._released:
            self._released = True
            self._release(self.entry, self.is_by_pass)

    def _check(self) -> None:
        if self._released:
            raise ClosedError(f"{self.entry.name} was released: hold it again to read it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
