"""The bytes that a stretch needs: ranges of files, and clips that are cut out of videos by their indexes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from asyncfetch.decode import Clip
from asyncfetch.errors import FormatError, redact_url
from asyncfetch.media import locate_moov, parse_moov
from asyncfetch.runtime.concurrently import gather

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from asyncfetch.decode import DepthScale
    from asyncfetch.media import ClipPlan, Mp4Index
    from asyncfetch.ranges import ObjectInfo
    from asyncfetch.runtime.concurrently import RunSync

HEAD_BYTES = 16 * 1024
"""Bytes asked for first. They hold the whole index of a short file, and tell where another one lies."""
FRAME_INDEX_BYTES = 8
"""Bytes of an index for a frame, asked for beside that: AV1 has 6 at two frames a key frame, H.264 and HEVC up to 14,
but rarely. What is asked for in vain is a thousandth of a frame; what is missing costs one request more."""
LEAST_FRAME_BYTES = 256
"""Least bytes of a frame of a video. A file that may be shorter than what is asked for of its head is asked for that
alone."""
MAX_INDEX_BYTES = 512 * 1024
"""Bytes asked for on a guess, in one stream; a longer index costs one request more."""
MAX_READS = 32
"""Requests for one index after the first. One is usual, and one for each long box in front that isn't media data."""
PARSED_ON_THE_LOOP_BYTES = 64 * 1024
"""Index that is parsed on the loop, in 0.3-0.5 ms. A thread takes 3-5 ms for one where a stream begins, for the loop is
busy there, and each waits for the end of the other's turn with the interpreter first, 5 ms by default."""


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """Bytes of a file that a stretch needs, as they are."""

    url: str
    start: int
    stop: int
    header: bytes = b""
    """Bytes to put in front of them."""

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return len(self.header) + self.stop - self.start

    @property
    def plan_nbytes(self) -> int:
        """Memory that this takes, without the bytes."""
        return len(self.header)

    def over(self, buffer: memoryview, *, name: str, depth: DepthScale | None = None) -> Clip | None:
        """Return the clip that these bytes are; None where they are no video."""
        return None

    def starts_too_late(self, buffer: memoryview) -> bool:
        """Return whether it has to be planned anew, from an earlier key frame."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class PlannedClip:
    """One camera's clip of a stretch: what to fetch, and how to make an MP4 of it."""

    url: str
    plan: ClipPlan
    first_frame: int = 0
    """Number of its first frame in the episode."""
    misplaced: NDArray[np.float64] | None = None
    """Shape (N, 2), as in ``Clip``: when each frame is due and when it is shown, if these are too far apart."""
    earlier: int | None = None
    """Number of key frames by which it starts earlier, as ``Mp4Index.clip`` takes it."""
    offset: int = 0
    """Position of the video in the file at this url."""

    @property
    def start(self) -> int:
        """First byte of the file to fetch."""
        return self.offset + self.plan.start

    @property
    def stop(self) -> int:
        """One past the last byte to fetch."""
        return self.offset + self.plan.stop

    @property
    def header(self) -> bytes:
        """Bytes to put in front of them."""
        return self.plan.header

    @property
    def nbytes(self) -> int:
        """Memory the clip takes: its header and its range."""
        return len(self.plan.header) + self.plan.stop - self.plan.start

    @property
    def plan_nbytes(self) -> int:
        """Memory the plan takes, without the clip."""
        plan = self.plan
        key_bytes = sum(frames.nbytes for frames in (plan.key_frames, plan.entries) if frames is not None)
        if plan.refresh is not None:
            key_bytes += plan.refresh.extents.nbytes + plan.refresh.times.nbytes
        misplaced_bytes = self.misplaced.nbytes if self.misplaced is not None else 0
        return len(plan.header) + plan.frame_index.nbytes + plan.pts.nbytes + key_bytes + misplaced_bytes

    def over(self, buffer: memoryview, *, name: str, depth: DepthScale | None = None) -> Clip:
        """Return the clip with its bytes, header and range, in ``buffer``."""
        plan = self.plan
        return Clip(
            data=buffer,
            frame_index=plan.frame_index,
            pts=plan.pts,
            timescale=plan.timescale,
            codec=plan.codec,
            width=plan.width,
            height=plan.height,
            name=name,
            depth=depth,
            key_frames=plan.key_frames,
            first_frame=self.first_frame,
            misplaced=self.misplaced,
            whole_from=None if plan.refresh is None else plan.refresh.whole_from(buffer),
        )

    def starts_too_late(self, buffer: memoryview) -> bool:
        """Return whether a decoder has whole pictures only after the clip's first: it is to start at an earlier one."""
        plan = self.plan
        if plan.refresh is not None:
            wanted = plan.pts[plan.frame_index >= 0].min()
            return not plan.refresh.is_all and plan.refresh.whole_from(buffer) > wanted
        return plan.entries is not None and plan.entries.have_recovery_points(buffer)


Planned = PlannedRange | PlannedClip


class FileReader(Protocol):
    """A RangeReader, as far as an index needs one."""

    async def fetch(self, url: str, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the file."""

    async def fetch_head(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """The file, and its first bytes."""

    async def fetch_tail(self, url: str, max_bytes: int) -> tuple[ObjectInfo, memoryview]:
        """The file, and its last bytes."""


async def fetch_moov(
    reader: FileReader, url: str, episodes: int = 0, frames: int = 0
) -> tuple[ObjectInfo, int, memoryview]:
    """The file, where its index begins, and that as ``parse_moov`` takes it. FormatError where it isn't an MP4.

    With as many ``episodes`` and ``frames`` in it as are said, where it is known, one round of requests mostly brings
    it: LeRobot puts the index in front, but in files of a single episode, where it comes last.
    """
    guess_bytes = min(HEAD_BYTES + frames * FRAME_INDEX_BYTES, MAX_INDEX_BYTES)
    tail = memoryview(b"")
    if episodes == 1 and frames * LEAST_FRAME_BYTES > HEAD_BYTES:
        (info, piece), (_, tail) = await gather(
            partial(reader.fetch_head, url, HEAD_BYTES), partial(reader.fetch_tail, url, guess_bytes)
        )
    else:
        info, piece = await reader.fetch_head(url, guess_bytes)
    start = 0
    for _ in range(MAX_READS):
        first, stop = locate_moov(piece, start=start, size=info.size, url=url)
        if stop <= start + len(piece):
            return info, first, piece[first - start : stop - start]
        tail_start = info.size - len(tail)
        start, piece = (
            first,
            tail[first - tail_start :] if first >= tail_start else await reader.fetch(url, first, stop),
        )
    raise FormatError(f"{redact_url(url)}: no 'moov' box among the first boxes, up to byte {start}: remux the video")


async def parsed_moov(moov: memoryview, url: str, run: RunSync) -> Mp4Index:
    """Return the index, parsed off the loop where it is long."""
    if len(moov) <= PARSED_ON_THE_LOOP_BYTES:
        return parse_moov(moov, url=url)
    return await run(partial(parse_moov, moov, url=url))
