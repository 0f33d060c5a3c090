"""A stretch of an episode while it is read: its rows beside its clips."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from asyncfetch.formats.held import HeldStretch
from asyncfetch.lerobot.rows import EpisodeRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncfetch.decode import FrameDecoder
    from asyncfetch.formats.held import ClipDecoders, StretchEntry
    from asyncfetch.lerobot.episode_table import Episode


class HeldEpisode(HeldStretch[EpisodeRows]):
    """A stretch of an episode, or all of it, that can be read until it is released.

    ``rows`` and ``frames`` may be used from any thread; frames are numbered in the episode.
    """

    def __init__(
        self,
        episode: Episode,
        entry: StretchEntry[EpisodeRows],
        decoders: ClipDecoders,
        release: Callable[[StretchEntry[EpisodeRows], bool], None],
        *,
        by_pass: bool = False,
    ) -> None:
        super().__init__(entry, decoders, release, by_pass=by_pass)
        self.episode = episode
        """The episode as the metadata has it."""

    @property
    def rows(self) -> EpisodeRows:
        """The table rows of its episode, by feature; pictures, for frames that the stretch's samples need."""
        return self.beside

    @contextmanager
    def decoding(self, camera: str, frames: Sequence[int], reader: int) -> Iterator[FrameDecoder]:
        """See HeldStretch; the frames must be of the stretch."""
        length = self.episode.length
        start, stop = self.stretch.span(camera, length)
        for frame in frames:
            if not start <= frame < stop and 0 <= frame < length:
                name = self.stretch.name(length)
                raise AssertionError(f"{name}: frame {frame} of {camera}, of which it holds [{start}, {stop})")
        with super().decoding(camera, frames, reader) as decoder:
            yield decoder
