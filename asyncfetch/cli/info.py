"""``asyncfetch info``: what a dataset is, and what an epoch of it costs before it is paid."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from asyncfetch.cli.sizes import format_bytes

__all__ = ["info"]

WORLD_SIZES = (1, 8, 64)


def info(
    source: Annotated[str, typer.Argument(help="The dataset, a directory or url.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a rank's batch, made by StreamDataset.")] = 32,
    num_workers: Annotated[int, typer.Option(min=0, help="Loader workers of a rank.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with bytes as numbers.")] = False,
) -> None:
    """Say what is in a dataset, and what a shuffled epoch fetches of it for 1, 8 and 64 ranks."""
    from asyncfetch.stream import Stream  # which loads what reads datasets

    stream = Stream(source)
    try:
        plans = [
            stream.traffic_plan(world_size=ranks, num_workers=num_workers, batch_size=batch_size)
            for ranks in WORLD_SIZES
        ]
        dataset = stream.opened()
        episodes, frames, fps, cameras = dataset.num_episodes, dataset.num_frames, dataset.fps, dataset.cameras
    finally:
        stream.close()
    if as_json:
        told = {"episodes": episodes, "frames": frames, "fps": fps, "cameras": list(cameras)}
        typer.echo(json.dumps(told | {"traffic": [asdict(plan) for plan in plans]}))
        return
    typer.echo(f"{episodes:,} episodes, {frames:,} frames at {fps:g} fps; cameras: {', '.join(cameras) or 'none'}")
    table = Table("ranks", "fetched an epoch", "of each byte", "largest rank", "requests", title="clips")
    for plan in plans:
        times = plan.fetched_bytes / max(1, plan.least_bytes)
        table.add_row(
            str(plan.world_size),
            format_bytes(plan.fetched_bytes),
            f"{times:.2f} x",
            format_bytes(plan.largest_rank_bytes),
            f"{plan.requests:,}",
        )
    Console().print(table)
