from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.cache.disk import DiskStore, DiskTier, Folder, verify
from asyncfetch.cache.disk.layout import HEADER_BYTES, BlockSpan, VersionFile, parse_file_name
from asyncfetch.errors import CacheError, ConfigError
from asyncfetch.ranges import ObjectInfo
from tests.cache.disk.conftest import CONTENT, DAMAGES, MIB, VERSION, Tier, flip_a_bit, get, put

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = len(CONTENT)
FILE_BYTES = MIB + 4096
"""What a whole block takes: its header needs a page more."""


def test_written_bytes_are_read_and_the_rest_is_missing(tier: Tier) -> None:
    disk = tier.open()
    put(disk, 100, 3 * MIB + 7)
    assert get(disk, 100, 3 * MIB + 7) == []
    assert get(disk, 0, 4 * MIB) == [BlockSpan(0, 100), BlockSpan(3 * MIB + 7, 4 * MIB)]
    statistics = disk.statistics()
    assert (statistics.written, statistics.written_bytes) == (4, 3 * MIB + 7 - 100)
    assert (statistics.hits, statistics.misses) == (4 + 2, 2)


def test_a_part_of_what_is_there_is_found(tier: Tier) -> None:
    disk = tier.open()
    put(disk, 10, 2 * MIB)
    assert get(disk, 500, MIB + 3) == []
    assert get(disk, 9, 20) == [BlockSpan(9, 10)]


def test_other_versions_and_objects_are_not_found(tier: Tier) -> None:
    disk = tier.open()
    put(disk, 0, 100)
    for info in (ObjectInfo("https://data.example.org/a", WHOLE, '"two"'), ObjectInfo("https://x/a", WHOLE, '"one"')):
        assert get(disk, 0, 100, VersionFile.of(info)) == [BlockSpan(0, 100)]


def test_stored_bytes_are_found_after_a_restart_and_by_others(tier: Tier) -> None:
    put(tier.open(), 0, WHOLE)
    assert get(tier.open(), 0, WHOLE) == []
    assert tier.stores[1].folder.used_bytes() == tier.on_disk_bytes() == 6 * FILE_BYTES


def test_files_not_in_memory_are_asked_for_at_once(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tier.open()
    put(disk, 0, 3 * MIB)
    os.sync()
    if not all(is_on_disk_alone(path) for path in tier.files()):
        pytest.skip("this file system keeps everything in memory, or can't tell what is there")
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *_: asked.append(os.fstat(file).st_ino))
    assert get(disk, 0, 3 * MIB) == []
    assert asked[:3] == [path.stat().st_ino for path in tier.files()]
    for _ in range(5):  # of what a busy machine forgets meanwhile it is asked for again
        asked.clear()
        assert get(disk, 0, 3 * MIB) == []
        if not asked:
            break
    assert asked == []


def is_on_disk_alone(path: Path) -> bool:
    """Have the system forget a file; whether it did."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # looking must not read ahead
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


# Its bounds.


@pytest.mark.parametrize("max_bytes", [1, FILE_BYTES - 1, FILE_BYTES, 3 * FILE_BYTES, 4 * FILE_BYTES + 5])
def test_the_bound_holds_at_every_moment(tier: Tier, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    write = os.pwritev

    def look(*arguments: Any) -> int:  # noqa: ANN401
        seen.append(tier.on_disk_bytes())
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", look)
    disk = tier.open(max_bytes)
    for _ in range(3):
        put(disk, 0, WHOLE)
        tier.now += 2
    assert max([0, *seen]) <= max_bytes
    assert tier.on_disk_bytes() == disk.folder.used_bytes() <= max_bytes
    assert len(tier.files()) >= max_bytes // FILE_BYTES - 1


def test_the_least_recently_used_goes_first(tier: Tier) -> None:
    disk = tier.open(6 * FILE_BYTES)
    put(disk, 0, WHOLE)
    assert get(tier.open(6 * FILE_BYTES), 0, 2 * MIB) == []  # read by another
    put(disk, 10, 20)
    left = [parse_file_name(path.name)[1] for path in tier.files()]
    assert set(left) == {BlockSpan(low, low + MIB) for low in (0, MIB, 3 * MIB, 4 * MIB, 5 * MIB)} | {BlockSpan(10, 20)}


def test_room_is_left_to_others_on_the_disk(tier: Tier) -> None:
    put(tier.open(), 0, WHOLE)
    free_bytes = tier.stores[0].folder.free_bytes()
    disk = tier.open(min_free_bytes=free_bytes + 64 * MIB)
    put(disk, 10, 20)
    assert (disk.statistics().written, len(tier.files())) == (0, 6)  # nothing it could delete would be enough
    disk = tier.open(min_free_bytes=disk.folder.free_bytes() + 2 * MIB)
    put(disk, 10, 20)
    assert disk.statistics().written == 1
    assert 2 <= 6 - (len(tier.files()) - 1) <= 4


def test_two_tiers_on_one_directory_have_one_bound(tier: Tier) -> None:
    one, two = tier.open(3 * FILE_BYTES), tier.open(3 * FILE_BYTES)
    for low in range(0, WHOLE, 2 * MIB):
        put(one, low, low + MIB)
        put(two, low + MIB, low + 2 * MIB)
        assert tier.on_disk_bytes() == one.folder.used_bytes() == two.folder.used_bytes() <= 3 * FILE_BYTES


# What others do to it.


@pytest.mark.parametrize("at", [0, 10, 33, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50, HEADER_BYTES + 99])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_never_read_is_deleted_and_counted(tier: Tier, damage: str, at: int) -> None:
    disk = tier.open()
    put(disk, 0, 100)
    DAMAGES[damage](tier.files()[0], at)
    assert get(disk, 0, 100) == [BlockSpan(0, 100)]
    assert (disk.statistics().damaged, tier.files()) == (1, [])
    put(disk, 0, 100)
    assert get(disk, 0, 100) == []


def test_a_range_is_read_from_files_of_others(tier: Tier) -> None:
    disk = tier.open()
    for low, high in ((0, 100), (90, 200), (250, 300), (MIB - 10, MIB + 10)):
        put(disk, low, high)
    assert get(disk, 50, 190) == []
    assert get(disk, 80, 310) == [BlockSpan(200, 250), BlockSpan(300, 310)]
    assert get(disk, MIB - 20, MIB + 20) == [BlockSpan(MIB - 20, MIB - 10), BlockSpan(MIB + 10, MIB + 20)]
    assert (disk.statistics().hits, disk.statistics().misses) == (1, 3)


def test_damage_in_a_larger_piece_hides_no_smaller_one(tier: Tier) -> None:
    disk = tier.open()
    put(disk, 0, 200)
    put(disk, 50, 60)
    larger = next(path for path in tier.files() if path.name.endswith(BlockSpan(0, 200).name))
    flip_a_bit(larger, HEADER_BYTES + 150)
    assert get(disk, 50, 60) == []
    assert get(disk, 50, 61) == [BlockSpan(50, 61)]
    assert disk.statistics().damaged == 1


def test_files_deleted_underneath_give_their_room_back(tier: Tier) -> None:
    disk = tier.open(3 * FILE_BYTES)
    put(disk, 0, 3 * MIB)
    for path in tier.files():
        path.unlink()
    assert len(get(disk, 0, 3 * MIB)) == 3
    put(disk, 0, 3 * MIB)
    assert get(disk, 0, 3 * MIB) == []


@pytest.mark.parametrize("gone", [".", "v1", "v1/new", "v1/objects", "v1/used", "v1/evicting"])
def test_store_survives_deletion_of_its_files(tier: Tier, gone: str) -> None:
    one, two = tier.open(4 * FILE_BYTES), tier.open(4 * FILE_BYTES)
    put(one, 0, 4 * MIB)
    path = tier.directory / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for low in range(0, WHOLE, 2 * MIB):
        put(one, low, low + MIB)
        put(two, low + MIB, low + 2 * MIB)
    assert get(one, 4 * MIB, WHOLE) == get(two, 4 * MIB, WHOLE) == []
    assert tier.on_disk_bytes() <= 4 * FILE_BYTES
    assert one.folder.used_bytes() == two.folder.used_bytes() == tier.on_disk_bytes()


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_directory_that_is_gone_comes_back_as_it_was(tier: Tier, how: str) -> None:
    disk = tier.open()
    put(disk, 0, MIB)
    made = {path.relative_to(tier.directory) for path in tier.directory.rglob("*") if path.parent.name != "objects"}
    if how == "deleted":
        shutil.rmtree(tier.directory)
    else:
        tier.directory.rename(tier.directory.with_name("elsewhere"))
    assert get(disk, 0, MIB) == [BlockSpan(0, MIB)]
    put(disk, 0, MIB)
    assert get(disk, 0, MIB) == []
    assert stat.S_IMODE(tier.directory.stat().st_mode) == 0o700
    assert made <= {path.relative_to(tier.directory) for path in tier.directory.rglob("*")} | {Path("v1/evicting")}
    other = tier.open()
    assert disk.folder.used_bytes() == other.folder.used_bytes() == tier.on_disk_bytes() == FILE_BYTES
    assert (disk.statistics().refusal, disk.statistics().failures) == ("", 0)


def test_a_directory_that_can_not_come_back_is_said_once(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    disk = tier.open()
    shutil.rmtree(tier.directory)
    tier.directory.write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            put(disk, 0, MIB)
            tier.now += 61
    [record] = caplog.records
    assert str(tier.directory) in record.message
    assert disk.statistics().refusal in record.message
    assert disk.statistics().refusal != ""
    tier.directory.unlink()
    put(disk, 0, MIB)
    assert get(disk, 0, MIB) == []
    assert disk.statistics().refusal == ""


def test_a_want_of_room_that_no_deletion_ends_is_said_once(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    disk = tier.open(min_free_bytes=2**60)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            put(disk, 0, MIB)
            tier.now += 2
        [record] = caplog.records
        assert f"the disk cache at {tier.directory} takes no more" in record.message
        assert "min_free_bytes=1,152,921,504,606,846,976 are left to others" in disk.statistics().refusal
        small = tier.open(FILE_BYTES - 1)
        put(small, 0, MIB)
        assert (
            f"a file of it takes {FILE_BYTES:,} bytes, and max_bytes is {FILE_BYTES - 1:,}" in caplog.records[1].message
        )
        tier.now += 2
        put(small, 0, 100)
    assert small.statistics().refusal == ""
    assert len(caplog.records) == 2


def test_room_that_an_eviction_makes_is_no_refusal(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    disk = tier.open(3 * FILE_BYTES)
    with caplog.at_level(logging.WARNING):
        put(disk, 0, WHOLE)
    assert (disk.statistics().refusal, caplog.records) == ("", [])


def test_strangers_files_are_left_alone(tier: Tier) -> None:
    disk = tier.open()
    put(disk, 0, MIB)
    mine = tier.files()[0].with_name("notes.txt")
    others = [mine, tier.directory / "mine.txt", tier.directory / "v1/objects/my/own/0-5"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    mine.with_name(f"{VERSION.name}-0-5").mkdir()
    assert [is_right for _, is_right in verify(disk.folder)] == [True]
    assert disk.folder.prune(0).files == 1
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_number_is_counted_anew_and_breaks_no_bound(tier: Tier, damage: str) -> None:
    disk = tier.open(6 * FILE_BYTES)
    put(disk, 0, WHOLE)
    used = tier.directory / "v1/used"
    for at in range(used.stat().st_size):
        DAMAGES[damage](used, at)
        put(disk, at, at + 10)
        assert tier.on_disk_bytes() <= disk.folder.used_bytes() <= 6 * FILE_BYTES
        tier.now += 2
    DAMAGES[damage](used, 0)
    assert tier.open().folder.used_bytes() == tier.on_disk_bytes()


def test_verify_finds_damage_and_leaves_the_order_of_use(tier: Tier) -> None:
    disk = tier.open()
    put(disk, 0, WHOLE)
    times = {path: path.stat().st_mtime_ns for path in tier.files()}
    damaged = tier.files()[2]
    with damaged.open("r+b") as file:
        file.write(b"!")
    os.utime(damaged, ns=(times[damaged], times[damaged]))
    longer = tier.files()[3]
    longer.write_bytes(longer.read_bytes() + b"more")
    assert sorted(file.path for file, is_right in verify(disk.folder) if not is_right) == [str(damaged), str(longer)]
    assert {path: path.stat().st_mtime_ns for path in tier.files()} == {
        path: at for path, at in times.items() if path not in {damaged, longer}
    }


# A disk that is full or broken.


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "truncate", "rename", "utime"])
def test_a_failed_write_is_said_once_and_tried_again_later(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    disk = tier.open()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, call, fail)
        put(disk, 0, 3 * MIB)
        assert (disk.statistics().failures, disk.statistics().skipped) == (1, 2)
        tier.now += 61
        put(disk, 0, 2 * MIB)
    assert disk.statistics().failures == 2
    [record] = caplog.records
    assert str(tier.directory) in record.message
    assert os.strerror(code) in record.message
    assert (tier.unfinished(), disk.folder.used_bytes(), tier.on_disk_bytes()) == ([], 0, 0)
    put(disk, 0, 3 * MIB)
    assert len(get(disk, 0, 3 * MIB)) == 3
    tier.now += 61
    put(disk, 0, 3 * MIB)
    assert get(disk, 0, 3 * MIB) == []


def test_a_write_that_is_cut_short_is_finished(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: write(file, [b"".join(buffers)[:1000]], at))
    disk = tier.open()
    put(disk, 0, 5000)
    assert get(disk, 0, 5000) == []


def test_a_failed_read_is_a_miss(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    disk = tier.open()
    put(disk, 0, 100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert get(disk, 0, 100) == [BlockSpan(0, 100)]
    assert disk.statistics().failures == 1
    assert get(disk, 0, 100) == []


# Two users.


def look(directory: Path) -> str:
    try:
        store = DiskStore(DiskTier(directory, MIB, min_free_bytes=0))
    except CacheError as error:
        return f"refused: {error}"
    place = bytearray(100)
    missing = store.read(VERSION, 0, memoryview(place))
    store.write(VERSION, 200, memoryview(CONTENT)[200:300])
    return f"missing {len(missing)} {bytes(place) == CONTENT[:100]}\n{store.statistics()}"


def as_nobody(directory: Path) -> str:
    """What another user finds there, in a process of their own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "it broke"
        try:
            os.setgid(65534)
            os.setuid(65534)
            answer = look(directory)
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as answers:
        said = answers.read()
    os.waitpid(child, 0)
    return said


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def reachable() -> Iterator[Tier]:
    """A tier that every user gets to: pytest keeps its own directories, and what is above them, to one."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        tier = Tier(Path(parent) / "tier", [])
        yield tier
        for store in tier.stores:
            store.close()


@needs_root
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_another_users_directory_is_refused_with_both_names(reachable: Tier) -> None:
    tier = reachable
    put(tier.open(), 0, 100)
    refused = as_nobody(tier.directory)
    assert "refused:" in refused
    tier.directory.chmod(0o755)
    refused = as_nobody(tier.directory)
    assert "belongs to user root, and this is user nobody" in refused
    assert "umask 002" in refused


@needs_root
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_shared_directory_serves_both_and_misses_unreadables(reachable: Tier) -> None:
    tier = reachable
    old = os.umask(0)
    try:
        tier.directory.mkdir(mode=0o777)
        put(tier.open(), 0, 100)
    finally:
        os.umask(old)
    assert "missing 0 True" in as_nobody(tier.directory)
    assert get(tier.stores[0], 200, 300) == []
    tier.files()[0].chmod(0)
    answer = as_nobody(tier.directory)
    assert "missing 1" in answer
    assert re.search(r"^failures +1$", answer, re.MULTILINE)


def test_a_new_directory_is_for_this_user_alone(tier: Tier) -> None:
    tier.open()
    assert tier.directory.stat().st_mode & 0o777 == 0o700
    assert (tier.directory / "CACHEDIR.TAG").read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier").write_text("a file")
    with pytest.raises(CacheError, match=r"tier can't be used: (File exists|Not a directory)"):
        DiskStore(DiskTier(tmp_path / "tier", MIB))


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": 1, "min_free_bytes": -1}])
def test_bounds_that_cannot_be_meant_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DiskTier("somewhere", **options)


@pytest.mark.parametrize("directory", ["", "a\0b", "~nobody-of-this-name/cache"])
def test_a_directory_that_cannot_be_meant_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError, match="director"):
        DiskTier(directory, 1)


def test_directory_becomes_no_tier_by_looking_at_it(tmp_path: Path) -> None:
    (tmp_path / "v1/objects").mkdir(parents=True)
    with pytest.raises(CacheError, match="no disk cache"):
        Folder(tmp_path, create=False)
    assert [*tmp_path.iterdir(), *(tmp_path / "v1").iterdir()] == [tmp_path / "v1", tmp_path / "v1/objects"]


def test_a_tier_is_a_value_whose_path_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert DiskTier("~/a", 1).path == DiskTier("a", 1).path == tmp_path / "a"
    assert VersionFile.of(ObjectInfo("https://data.example.org/a", WHOLE, '"one"')) == VERSION
