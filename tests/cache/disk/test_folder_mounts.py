from __future__ import annotations

import errno
import fcntl
from typing import TYPE_CHECKING

import pytest

from asyncfetch.cache.disk import folder
from asyncfetch.cache.disk.folder import Mount, mount_of, require_locks, why_unfit
from asyncfetch.errors import CacheError

if TYPE_CHECKING:
    from pathlib import Path

LINES = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,errors=remount-ro
30 22 0:30 / /mnt/with\\040space rw - nfs4 server:/export rw,vers=4.2
31 22 0:31 / /mnt/lustre rw - lustre mgs@tcp:/fs rw,flock,lazystatfs
32 22 0:32 / /mnt/lustre/old rw - lustre mgs@tcp:/fs rw,lazystatfs
33 22 0:33 / /mnt/ssh rw,nosuid - fuse.sshfs me@there: rw,user_id=0
34 22 0:34 / /mnt/twice rw - cifs //server/share rw
35 34 0:35 / /mnt/twice rw - tmpfs tmpfs rw
broken line
""".splitlines()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me/cache", "ext4"),
        ("/mnt/with space", "nfs4"),
        ("/mnt/with space/deep/down", "nfs4"),
        ("/mnt/with space-not", "ext4"),
        ("/mnt/lustre/new", "lustre"),
        ("/mnt/twice/x", "tmpfs"),
    ],
)
def test_a_path_lies_on_the_deepest_and_last_mount_above_it(path: str, kind: str) -> None:
    mount = mount_of(path, LINES)
    assert mount is not None
    assert mount.file_system == kind


@pytest.mark.parametrize("path", ["/mnt/with space/a", "/mnt/lustre/old/a", "/mnt/ssh/a"])
def test_file_system_without_proper_locks_is_unfit(path: str) -> None:
    mount = mount_of(path, LINES)
    assert mount is not None
    assert why_unfit(mount)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse", "fuse.s3fs", "fuse.gcsfuse", "lustre"])
def test_file_systems_that_are_refused(kind: str) -> None:
    assert why_unfit(Mount("/", kind, frozenset({"rw"})))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuseblk", "ceph", "gpfs"])
def test_file_systems_that_are_accepted(kind: str) -> None:
    assert why_unfit(Mount("/", kind, frozenset({"rw"}))) is None
    assert why_unfit(Mount("/", "lustre", frozenset({"rw", "localflock"}))) is None


def test_the_error_names_the_file_system_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"9 1 0:9 / / rw - ext4 disk rw\n10 9 0:10 / {tmp_path.resolve()} rw - nfs4 there:/ rw\n")
    monkeypatch.setattr(folder, "_MOUNTS", table)
    with pytest.raises(CacheError, match=rf"{tmp_path} is on nfs4 \(mounted at .*Choose a directory on a local disk"):
        require_locks(tmp_path, tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


def test_locks_that_do_not_exclude_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_locks(tmp_path, tmp_path / "lock")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(CacheError, match="a lock that one has, another gets too"):
        require_locks(tmp_path, tmp_path / "lock")


def test_missing_locks_are_a_cache_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(CacheError, match="another gets too"):
        require_locks(tmp_path, tmp_path / "lock")
