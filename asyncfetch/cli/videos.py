"""``asyncfetch index``, and what ``info``, ``check`` and ``frames`` show of a collection of videos."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import numpy as np
import typer

from asyncfetch.cli.files import shown_span
from asyncfetch.cli.source import KindOption, Source, StartOption, StopOption, VideoOption, find_source
from asyncfetch.cli.terminal import CaFile, format_bytes, progress
from asyncfetch.config import FetchConfig
from asyncfetch.errors import ConfigError, redact_url
from asyncfetch.fetch import Fetcher
from asyncfetch.fetch.batch import for_each
from asyncfetch.runtime.threads import run_sync
from asyncfetch.tables.packed import MARK
from asyncfetch.tables.unpacked import UnpackedReader
from asyncfetch.videos import ClipSampler, Videos
from asyncfetch.videos.index import BROKEN, MEASURED_AT_ONCE, Measuring, videos_of
from asyncfetch.videos.index_file import HEADERS_SUFFIX, JOURNAL_SUFFIX, write_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from asyncfetch.config import StreamConfig
    from asyncfetch.videos.entry_table import Entries

LOOKED_AT = 64
"""Videos by which ``info`` says what all of them are like, where there is no index."""
NAMED = 20
"""Broken videos that are named; the index has all of them."""
CHECKED_FRAMES = 8
"""Frames of a clip that ``check --decode`` decodes of each entry."""


def index(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="The Parquet file to write, at a local path.")],
    kind: KindOption = None,
    video: VideoOption = None,
    start: StartOption = None,
    stop: StopOption = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Measure each video of a collection once, and write an index: Videos.from_table then opens it at once.

    What was measured is kept beside it until it is whole: run the same command again to go on after an error or a kill.
    Videos that can't be read are in the index, with the reason in its column "error".
    """
    config = FetchConfig(ca_file=ca_file)
    videos = find_source(source, config, kind, video=video, start=start, stop=stop)
    if not isinstance(videos, Videos):
        raise ConfigError(f"{redact_url(source)} is a LeRobot dataset, which has an index: stream it as it is")
    try:
        with progress("videos") as show:

            def report(what: str, done: int, total: int) -> None:
                show(what, done / total, f"{done:,}/{total:,}")

            made = anyio.run(partial(write_index, videos, output, config=config, on_progress=report))
    except BaseException:
        if any(output.with_name(output.name + suffix).exists() for suffix in (JOURNAL_SUFFIX, HEADERS_SUFFIX)):
            typer.echo("what was read is kept: run the same command again to go on", err=True)
        raise
    if as_json:
        typer.echo(json.dumps(asdict(made)))
        return
    went_on = f", {made.resumed:,} measured earlier" if made.resumed else ""
    typer.echo(
        f"{output}: {_count(made.entries, 'entry', 'entries')} of {_count(made.videos, 'video')}, "
        f"{format_bytes(made.bytes)}, {_hours(made.seconds)}{went_on}"
    )
    videos_broken = [(entry, reason) for entry, _, reason in made.broken if entry is not None]
    for entry, _, reason in made.broken:
        if entry is None:
            typer.echo(f"a shard is left out: {reason}")
    if videos_broken:
        typer.echo(f"{_count(len(videos_broken), 'video')} can't be read:")
    for number, reason in videos_broken[:NAMED]:
        typer.echo(f"entry {number}: {reason}")
    if len(videos_broken) > NAMED:
        typer.echo(f"and {len(videos_broken) - NAMED:,} more: see the index's column error")


def show_info(videos: Videos, config: FetchConfig, *, as_json: bool) -> None:
    """Print what is in a collection."""
    found = anyio.run(_info, videos, config)
    if as_json:
        typer.echo(json.dumps(found))
        return
    about = "" if found["looked_at"] == found["videos"] else f"about, by {found['looked_at']} of the videos: "
    typer.echo(
        f"{videos!r}: {_count(found['entries'], 'entry', 'entries')} of {_count(found['videos'], 'video')} in "
        f"{_count(found['files'], 'file')}"
    )
    typer.echo(f"{about}{format_bytes(found['bytes'])}, {_hours(found['hours'] * 3600)}")
    for form in found["forms"]:
        sound = f", {form['with_audio']:,} with audio" if form["with_audio"] else ""
        rate = f"{form['fps']:g} fps" if form["fps"] is not None else "several rates"
        many = _count(form["videos"], "video")
        typer.echo(
            f"  {form['width']}x{form['height']} {form['codec']}, {rate}: {many}, {_hours(form['seconds'])}{sound}"
        )
    for name, dtype in found["columns"].items():
        typer.echo(f"  {name}: {dtype}")
    for name in found["members"]:
        typer.echo(f"  {name}: a file beside each video")
    for reason in found["broken"][:NAMED]:
        typer.echo(f"can't be read: {reason}")


async def _info(videos: Videos, config: FetchConfig) -> dict[str, Any]:
    async with Fetcher(config) as fetcher:
        reader = UnpackedReader(fetcher)
        entries = await videos.read(fetcher, reader=reader)
        firsts = [group[0] for group in await run_sync(videos_of, entries)]
        if "frames" in entries.measures:
            looked, broken = await run_sync(_by_index, entries, firsts)
        else:
            chosen = np.unique(np.linspace(0, len(firsts) - 1, min(LOOKED_AT, len(firsts))).astype(int))
            looked, broken = await _by_sample(entries, [firsts[place] for place in chosen], reader)
    return await run_sync(_summary, entries, len(firsts), looked, broken)


def _by_index(entries: Entries, firsts: Sequence[int]) -> tuple[pa.Table, list[str]]:
    table = entries.table.select(["size", *entries.measures.values()])
    table = table.rename_columns(["size", *entries.measures]).take(firsts)
    broken = [reason for reason in table["error"].to_pylist() if reason is not None]
    return table.filter(table["error"].is_null()), broken


async def _by_sample(entries: Entries, chosen: Sequence[int], reader: UnpackedReader) -> tuple[pa.Table, list[str]]:
    import pyarrow as pa

    measuring, found, broken = Measuring(reader), list[dict[str, Any]](), list[str]()

    async def measure(entry: int) -> None:
        try:
            found.append((await measuring.measure(entries.place(entry)))._asdict())
        except BROKEN as error:
            broken.append(str(error))

    await for_each(chosen, measure, workers=MEASURED_AT_ONCE)
    names = ("size", "seconds", "frames", "fps", "width", "height", "codec", "has_audio")
    return pa.table({name: [each[name] for each in found] for name in names}), broken


def _summary(entries: Entries, count: int, looked: pa.Table, broken: list[str]) -> dict[str, Any]:
    """The facts about a collection of so many videos, by those that were looked at."""
    import pyarrow.compute as pc

    share = count / max(looked.num_rows + len(broken), 1)
    files = {str(url).partition(MARK)[0] for url in entries.table["video"].unique().to_pylist()}
    aggregates: list[Any] = [("seconds", "count"), ("seconds", "sum"), ("fps", "min"), ("fps", "max")]
    looked = looked.set_column(looked.column_names.index("has_audio"), "has_audio", looked["has_audio"].cast("int64"))
    forms = looked.group_by(["width", "height", "codec"]).aggregate([*aggregates, ("has_audio", "sum")]).to_pylist()
    return {
        "url": entries.url,
        "entries": len(entries),
        "videos": count,
        "files": len(files),
        "looked_at": looked.num_rows + len(broken),
        "bytes": round((pc.sum(looked["size"]).as_py() or 0) * share),
        "hours": (pc.sum(looked["seconds"]).as_py() or 0) * share / 3600,
        "forms": [
            {
                "width": form["width"],
                "height": form["height"],
                "codec": form["codec"],
                "fps": round(form["fps_max"], 3) if form["fps_max"] - form["fps_min"] < 0.01 else None,
                "videos": form["seconds_count"],
                "seconds": form["seconds_sum"],
                "with_audio": form["has_audio_sum"],
            }
            for form in sorted(forms, key=lambda form: -form["seconds_count"])
        ],
        "columns": {name: entries.dtype(name) for name in entries.own},
        "members": list(entries.members),
        "broken": broken,
    }


def show_defects(videos: Videos, config: StreamConfig, *, deep: bool, as_json: bool) -> None:
    """Print what is broken in a collection; exit with 1 if something is."""
    with progress("videos' indexes") as show:
        found, entries = anyio.run(_check_indexes, videos, config.fetch, show)
        if deep:
            known = {entry for entry, *_ in found}
            left = [entry for entry in range(entries) if entry not in known]
            found += _check_clips(videos, config, left, show) if left else []
    found.sort(key=lambda one: -1 if one[0] is None else one[0])
    if as_json:
        findings = [{"what": what, "entry": entry, "details": details} for entry, what, details in found]
        typer.echo(json.dumps({"findings": findings}))
    else:
        for entry, what, details in found:
            typer.echo(f"{what}: {'' if entry is None else f'entry {entry}: '}{details}")
        typer.echo(_count(len(found), "finding") if found else "nothing found")
    if found:
        raise typer.Exit(1)


Found = tuple[int | None, str, str]
"""An entry, None for a whole shard; what is wrong, and how."""


async def _check_indexes(videos: Videos, config: FetchConfig, show: Callable[..., None]) -> tuple[list[Found], int]:
    """Findings by the videos' indexes, and the number of entries."""
    async with Fetcher(config) as fetcher:
        found, reader = list[Found](), UnpackedReader(fetcher)
        entries = await videos.read(
            fetcher,
            reader=reader,
            on_bad_shard=lambda _, error: found.append((None, "FormatError", str(error))),
            on_progress=lambda done, total: show("shards", done / total, f"{done:,}/{total:,}"),
        )
        groups = await run_sync(videos_of, entries)
        measuring, done = Measuring(reader), 0

        async def look(group: list[int]) -> None:
            nonlocal done
            spans = [entries.span(entry) for entry in group]
            try:
                measured = await measuring.measure(entries.place(group[0]), spans)
            except BROKEN as error:
                found.extend((entry, type(error).__name__, str(error)) for entry in group)
            else:
                found.extend(
                    (entry, "empty span", f"no frame of {measured.seconds:g} s of video is shown in {shown_span(span)}")
                    for entry, span, (frames, _) in zip(group, spans, measured.spans, strict=True)
                    if not frames
                )
            done += 1
            show("videos' indexes", done / len(groups), f"{done:,}/{len(groups):,}")

        await for_each(groups, look, workers=MEASURED_AT_ONCE)
    return found, len(entries)


def _check_clips(videos: Videos, config: StreamConfig, chosen: Sequence[int], show: Callable[..., None]) -> list[Found]:
    """Findings by a clip of each of these entries."""
    from asyncfetch.streams import Stream  # slow to load

    clips = ClipSampler(CHECKED_FRAMES, pick="uniform")
    with closing(Stream(videos, clips=clips, shuffle=False, episodes=chosen, config=config)) as stream:
        for number, _ in enumerate(stream, 1):
            show("clips", number / len(chosen), f"{number:,}/{len(chosen):,}")
        return [(bad.episode, "bad data", bad.cause) for bad in stream.quarantine.episodes()]


def entry_pictures(videos: Videos, config: StreamConfig, entry: int, count: int) -> list[Any]:
    """Pictures of an entry, from its first frame to its last one: tensors (3, height, width)."""
    from asyncfetch.streams import Stream  # slow to load

    clips = ClipSampler(1, pick="uniform", per_video=count)
    stream = Stream(videos, clips=clips, shuffle=False, episodes=[entry], features=[], config=config)
    with closing(stream):
        return [sample["video"][0] for sample in stream]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds:.1f} s"
