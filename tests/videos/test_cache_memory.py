"""Videos far larger than the memory that they are read in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from asyncfetch.testing import RangeServer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("programs_are_warm")

MIB = 1024 * 1024
FILE_BYTES, FILES, CLIPS, FRAMES = 85_000_000, 3, 8, 4
MAX_BYTES, DECODED_MAX_BYTES = 16 * MIB, 8 * MIB
ALLOWANCE_BYTES = 32 * MIB
"""For what neither of them counts: connections' buffers, decoders' pictures, and what malloc keeps of all of these."""

PROGRAM = f"""
import json, re, sys
from contextlib import closing
import asyncfetch as af

url, ca_file = sys.argv[1:]

def memory(of):
    with open("/proc/self/status") as status:
        return int(re.search(rf"{{of}}:\\s+(\\d+)", status.read())[1]) * 1024

def read(names):
    config = af.StreamConfig(
        fetch=af.FetchConfig(ca_file=ca_file), max_bytes={MAX_BYTES}, decoded_max_bytes={DECODED_MAX_BYTES})
    videos = af.Videos.from_table([{{"video": f"{{url}}/{{name}}"}} for name in names])
    with closing(af.Stream(videos, clips=af.ClipSampler({FRAMES}, per_video={CLIPS}), config=config, seed=0)) as stream:
        return sum(len(sample["video"]) for sample in stream), stream.statistics()

read(["second.mp4"])  # what comes into memory once, at the first of anything
before = memory("VmRSS")
frames, statistics = read([f"{{number}}.mp4" for number in range({FILES})])
print(json.dumps([frames, statistics.fetch.bytes, memory("VmHWM") - before]))
"""


def test_memory_has_its_bounds_whatever_the_files(tmp_path: Path) -> None:
    """Clips of files of 85 MB, any of which is larger than all that may be in memory."""
    ffmpeg = ["ffmpeg", "-nostdin", "-v", "error"]
    second, long = tmp_path / "second.mp4", tmp_path / "long.mp4"
    noise = "-f lavfi -i testsrc2=size=640x360:rate=30 -t 1 -vf noise=alls=80:allf=t -pix_fmt yuv420p"
    coded = "-c:v libx264 -preset ultrafast -qp 14 -g 5 -sc_threshold 0"
    subprocess.run([*ffmpeg, *noise.split(), *coded.split(), str(second)], check=True)
    repeats = FILE_BYTES // second.stat().st_size
    copied = f"-stream_loop {repeats} -i {second} -c copy {long}"
    subprocess.run([*ffmpeg, *copied.split()], check=True)
    content = long.read_bytes()
    assert len(content) >= FILE_BYTES > MAX_BYTES + DECODED_MAX_BYTES + ALLOWANCE_BYTES
    files = {"second.mp4": second.read_bytes()} | {f"{number}.mp4": content for number in range(FILES)}
    with RangeServer(files) as server:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        command = [sys.executable, "-c", PROGRAM, server.url, str(server.ca_file)]
        result = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True)
    frames, fetched_bytes, growth = json.loads(result.stdout)
    assert frames == FILES * CLIPS * FRAMES
    assert 2 * MAX_BYTES < fetched_bytes < FILES * len(content)  # much goes through it, and not all there is
    assert growth <= MAX_BYTES + DECODED_MAX_BYTES + ALLOWANCE_BYTES, f"{growth / MIB:.0f} MiB"
