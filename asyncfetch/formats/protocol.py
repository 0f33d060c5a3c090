"""The protocols by which a stream reads a format: closed, open, and its maker of samples.

A format is data of one kind, and how it is read. A stream opens it over an engine, and asks the open one how many
samples each *episode* gives: an entry of the data, whatever the format calls it, of which the order draws neighbouring
samples, *frames*, as segments. It then has a ``StretchReader`` fetch segments, and a ``SampleMaker`` make samples of
what was fetched, in threads.

``formats.ranges`` has all of that for formats whose samples are made of some byte ranges each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.config import StreamConfig
    from asyncfetch.formats.reader import StretchReader
    from asyncfetch.formats.samples import Field, Row, Sample
    from asyncfetch.formats.stretch import Reach
    from asyncfetch.resources import Engine


class SampleMaker(Protocol):
    """Makes samples of stretches in memory. Called in decode threads, several at a time."""

    @property
    def reach(self) -> Reach:
        """The reach of samples: how far they go beyond their own frame; stretches carry it."""

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes."""

    @property
    def pictures(self) -> frozenset[str]:
        """The keys of pictures, which lie channels-last in batches."""

    def layout(self) -> Mapping[str, Field] | None:
        """Every value of a sample, by key; None where only samples show it.

        Where a shape varies, or isn't known, samples are made before they are stacked.
        """

    def build(self, asked: Sequence[Any]) -> Sequence[Sample]:
        """The samples that are asked for, in order: see ``samples.Asked``."""

    def write(self, asked: Sequence[Any], rows: Sequence[Row]) -> None:
        """The samples that are asked for, each into its row. Only called where all shapes are known.

        Raises:
            DoesNotFit: One can't be written there, and is to be built. Rows may have been written to.
        """


class OpenFormat(Protocol):
    """Data that is open for a stream. Loop-bound, but for what it says of itself."""

    @property
    def url(self) -> str:
        """The data's url, for messages."""

    @property
    def config(self) -> StreamConfig:
        """Bounds, limits and threads."""

    @property
    def reader(self) -> StretchReader[Any]:
        """Fetches and holds stretches."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal data read in the same way, wherever it lies: a state of another one is refused."""

    @property
    def frames_per_second(self) -> float | None:
        """Frames of a second of an episode, by which ``segment_seconds`` cuts; None where each is a segment."""

    @property
    def group_frames(self) -> int:
        """Neighbouring frames that are decoded together, and that segments aren't cut inside of."""

    @property
    def stats(self) -> Mapping[str, Any] | None:
        """Statistics of the features, for normalising; None where there are none."""

    def episodes(self, chosen: Sequence[int] | None) -> Sequence[int]:
        """Return the episodes that are read: all, or those chosen. EpisodeNotFound where one isn't there."""

    def lengths(self, chosen: Sequence[int] | None) -> NDArray[np.integer[Any]]:
        """Return the frames of each of them."""

    def files(self, chosen: Sequence[int] | None) -> Mapping[str, NDArray[np.int64]]:
        """Return the number of the file that each of them is read from, by camera."""

    @property
    def file_bytes(self) -> int | None:
        """The most bytes of a file of several episodes, by the metadata; None where that isn't known."""

    def urls(self, episode: int) -> Sequence[str]:
        """Return the files of an episode, the likeliest to be named in an error last."""

    @property
    def draws_anew(self) -> bool:
        """True if a frame is another one in each epoch: stretches then carry the epoch."""

    def sample_maker(self) -> SampleMaker:
        """Return what makes its samples. ConfigError where they can't be made as asked."""


@runtime_checkable
class Format(Protocol):
    """Data of one kind, and how it is read; not open. Pickles as the stream does that reads it."""

    __slots__ = ()

    @property
    def is_open(self) -> bool:
        """True if it reads what a user has opened, with an engine of its own: it can't follow into other processes."""

    def reader(self) -> StretchReader[Any] | None:
        """Return the reader of what is open; None if nothing is. ClosedError where it isn't open any more."""

    def opened(
        self, engine: Engine | None, config: StreamConfig
    ) -> AbstractAsyncContextManager[OpenFormat, bool | None]:
        """Open it over an engine that others share; None where it is open."""
