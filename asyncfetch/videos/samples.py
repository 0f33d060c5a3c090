"""The way from windows in memory to samples: dicts of tensors. Runs in decode threads, never on the loop."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncfetch.decode import stack_frames
from asyncfetch.decode.backends import choose_backend, import_torch
from asyncfetch.decode.decoder import tensor_on
from asyncfetch.errors import DecodeError, FormatError, redact_url
from asyncfetch.formats.samples import DoesNotFit, Field, by_reader, write_picture
from asyncfetch.runtime.fork import forks_wait
from asyncfetch.videos.cache import WHOLE
from asyncfetch.videos.plan import WindowClip, WindowTimes
from asyncfetch.videos.whole import WholeVideo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from asyncfetch.formats.samples import Asked, Row, Sample
    from asyncfetch.formats.stretch import Reach
    from asyncfetch.videos.cache import HeldWindows, VideoCache
    from asyncfetch.videos.entry_table import Entries, Place

GUESSED_PICTURE = 1080, 1920
"""Height and width of pictures before any video was seen."""
TEXT = frozenset({"txt", "text", "cls", "cls2", "caption", "srt", "vtt"})
"""Extensions of files that are text, given as str."""


class WindowSamples:
    """Makes the samples of a collection's windows. Thread-safe.

    They have ``num_frames`` pictures of this ``size`` (height, width), or of their own where it is None; audio of so
    many samples a second, or none; those of the user's columns and of the files beside the videos that are given.
    """

    reach: Reach = ()
    pictures = frozenset({"video"})

    def __init__(
        self,
        entries: Entries,
        cache: VideoCache,
        *,
        num_frames: int,
        size: tuple[int, int] | None,
        audio_rate: int | None,
        columns: Sequence[str],
        members: Sequence[str],
    ) -> None:
        self._entries = entries
        self._cache = cache
        self._num_frames = num_frames
        self._size = size
        self._audio_rate = audio_rate
        self._columns = {name: Field(entries.dtype(name)) for name in columns}
        self._lacking = frozenset(
            name for name, like in self._columns.items() if like.dtype in {"bool", "int64"} and entries.has_nulls(name)
        )
        """Columns of numbers of which no number stands for none: their batches are lists."""
        self._members = members

    @property
    def sample_bytes(self) -> int:
        """About what one sample takes: by the largest pictures seen so far."""
        height, width = self._size or self._cache.largest_picture
        if not height:
            height, width = GUESSED_PICTURE
        return 1024 + self._num_frames * 3 * height * width

    def layout(self) -> dict[str, Field]:
        """Every value of a sample, by key."""
        shape = (self._num_frames, 3, *(self._size or self._cache.largest_picture))
        fields = {
            "video": Field("uint8", shape, varies=self._size is None),
            "seconds": Field("float64", (self._num_frames,)),
            "index": Field("int64"),
            "clip_index": Field("int64"),
        }
        if self._audio_rate is not None:
            fields["audio"] = Field("float32", (1, 0), varies=True)
        for name, like in self._columns.items():
            fields[name] = Field("object") if name in self._lacking else like
        return fields | dict.fromkeys(self._members, Field("object"))

    def build(self, asked: Sequence[Asked]) -> list[Sample]:
        """The samples that are asked for, in order."""
        samples: list[Sample] = [{} for _ in asked]
        with forks_wait():
            for held, reader, places in by_reader(asked):
                for place in places:
                    samples[place] = self._sample(held, asked[place][1], reader)
        return samples

    def write(self, asked: Sequence[Asked], rows: Sequence[Row]) -> None:
        """The samples that are asked for, each into its row; a picture as soon as it is decoded."""
        with forks_wait():
            for held, reader, places in by_reader(asked):
                for place in places:
                    number, row = asked[place][1], rows[place]
                    row.put("seconds", self._give(held, number, reader, partial(_write_to, row.at("video"))))
                    for key, value in self._beside(held, number).items():
                        row.put(key, value)

    def _sample(self, held: HeldWindows, number: int, reader: int) -> Sample:
        torch = import_torch()
        if not isinstance(held.beside, WindowTimes):
            sample = self._of_whole(held, number)
        else:
            parts = list(self._parts(held, number))
            if len(parts) == 1:
                [(name, _, frames)] = parts
                video, seconds = held.frames(name, frames, reader=reader), self._seconds(held, number)
            else:
                pictures: list[Any] = [None] * self._num_frames
                seconds = self._give(held, number, reader, pictures.__setitem__)
                video = stack_frames(pictures)
            sample = {"video": video, "seconds": torch.from_numpy(seconds)}
            if self._audio_rate is not None:
                sample["audio"] = self._audio(held, number, self._audio_rate)
        sample |= self._beside(held, number)
        for key in ("index", "clip_index"):
            sample[key] = torch.tensor(sample[key])
        for key, like in self._columns.items():
            if like.is_tensor and isinstance(sample[key], int | float):
                sample[key] = torch.tensor(sample[key], dtype=getattr(torch, like.dtype))
        return sample

    def _seconds(self, held: HeldWindows, number: int) -> NDArray[np.float64]:
        windows = held.beside
        assert isinstance(windows, WindowTimes)
        seconds: NDArray[np.float64] = windows.seconds[number - held.stretch.start].copy()
        return seconds

    def _parts(self, held: HeldWindows, number: int) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield each clip that has frames of a window: its name, and their places in the window and in the clip."""
        first = (number - held.stretch.start) * self._num_frames
        for name, planned in held.entry.planned.items():
            if isinstance(planned, WindowClip) and planned.places is not None:
                low, high = np.searchsorted(planned.places, (first, first + self._num_frames)).tolist()
                if low < high:
                    yield name, (planned.places[low:high] - first).tolist(), list(range(low, high))

    def _give(
        self, held: HeldWindows, number: int, reader: int, take: Callable[[int, torch.Tensor], None]
    ) -> NDArray[np.float64]:
        """Give each picture of a window with its place there; return when each is shown."""
        if not isinstance(held.beside, WindowTimes):
            raise DoesNotFit  # its pictures are known when it is open
        for name, places, frames in self._parts(held, number):
            held.give(name, frames, partial(_take, take, places), reader=reader)
        return self._seconds(held, number)

    def _of_whole(self, held: HeldWindows, number: int) -> Sample:
        """Video, times and audio of a window, of a video that is whole in memory."""
        beside = held.beside
        assert isinstance(beside, WholeVideo)
        data, name = held.data(WHOLE), held.entry.name
        whole = beside.frames(data, name)
        self._cache.note_picture(whole.height, whole.width)
        frames, end_seconds = self._cache.window_of(held.stretch, number, whole.seconds, whole.end_seconds)
        backend, size, seconds = self._cache.backend, self._cache.size, whole.seconds[frames]
        video = whole.pictures(data, frames.tolist(), backend=backend, size=size, name=name)
        sample: Sample = {"video": video, "seconds": import_torch().from_numpy(seconds)}
        if self._audio_rate is not None:
            begin = float(seconds.min())
            sample["audio"] = (
                _audio_of(data, begin, end_seconds, self._audio_rate, name) if whole.has_audio else _no_audio()
            )
        return sample

    def _audio(self, held: HeldWindows, number: int, rate: int) -> torch.Tensor:
        windows = held.beside
        assert isinstance(windows, WindowTimes)
        plan = None if windows.audio is None else windows.audio[number - held.stretch.start]
        if plan is None or not plan.parts:
            return _no_audio()
        data: list[bytes | memoryview] = [plan.header]
        for part in plan.parts:
            header_bytes = len(held.entry.planned[part.name].header)
            data.append(held.data(part.name)[header_bytes + part.start : header_bytes + part.stop])
        return _audio_of(b"".join(data), plan.start_seconds, plan.stop_seconds, rate, held.entry.name)

    def _beside(self, held: HeldWindows, number: int) -> dict[str, Any]:
        """The rest of a sample: what its entry's row says, and the files beside its video."""
        entry = held.stretch.episode
        found: dict[str, Any] = {"index": entry, "clip_index": number}
        found |= {name: self._column(entry, name) for name in self._columns}
        for name in self._members:
            where = self._entries.member(entry, name)
            found[name] = None if where is None else self._member(held, name, where)
        return found

    def _column(self, entry: int, name: str) -> Any:  # noqa: ANN401
        value, like = self._entries.value(entry, name), self._columns[name]
        if value is None:
            return math.nan if like.dtype.startswith("float") else None
        return import_torch().tensor(value) if name in self._lacking else value

    def _member(self, held: HeldWindows, name: str, place: Place) -> Any:  # noqa: ANN401
        data = bytes(held.data(name)) if name in held.entry.planned else b""  # a file without bytes needs none fetched
        kind = name.rpartition(".")[2]
        where = f"{name} of {held.entry.name}, in {redact_url(place.url)}"
        try:
            if kind in TEXT:
                return data.decode()
            return json.loads(data) if kind == "json" else data
        except ValueError as error:
            remedy = f"write it anew, or leave {name!r} out by features="
            raise FormatError(f"{where}: not the {kind} that its name says: {error}", remedy=remedy) from error


def _take(take: Callable[[int, torch.Tensor], None], places: Sequence[int], place: int, picture: torch.Tensor) -> None:
    take(places[place], picture)


def _write_to(room: NDArray[Any], place: int, picture: torch.Tensor) -> None:
    write_picture(picture, room[place])


def _audio_of(data: bytes | memoryview, start: float, stop: float, rate: int, name: str) -> torch.Tensor:
    """The audio that a file in memory plays in [start, stop) seconds: (channels, samples) float32."""
    choose_backend("torchcodec")  # or an error that says what is missing
    from torchcodec.decoders import AudioDecoder  # type: ignore[attr-defined]

    try:
        decoder = AudioDecoder(tensor_on(data), sample_rate=rate)
        found: torch.Tensor = decoder.get_samples_played_in_range(start, stop).data
    except (RuntimeError, ValueError, IndexError) as error:
        message = f"{name}: torchcodec can't decode its audio from {start:.6f} s to {stop:.6f} s: {error}"
        raise DecodeError(message) from error
    return found


def _no_audio() -> torch.Tensor:
    """The audio of a video that has none: no channel, no sample."""
    none: torch.Tensor = import_torch().zeros((0, 0))
    return none
