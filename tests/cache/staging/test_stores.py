"""Stores: directories, urls, tar archives, each as its users see it and through a pool."""

from __future__ import annotations

import gc
import io
import os
import pickle
import subprocess
import tarfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from asyncfetch.cache.staging import CachePool, DirectoryStore, KeyedStore, SourceInfo, TarStore, UrlStore, remote
from asyncfetch.config import FetchConfig
from asyncfetch.errors import AccessDenied, ClosedError, ConfigError, FetchError, FormatError, NotFound, ObjectChanged
from asyncfetch.testing import Fault, RangeServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from asyncfetch.testing import ServedRequest

FILES = {f"{number:03}.txt": b"%d " % number * (number * 50) for number in range(40)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    for name, data in FILES.items():
        (root / name).write_bytes(data)
    names = sorted(FILES)
    # GNU tar, an independent tool, makes the archives.
    subprocess.run(["tar", "-C", root, "-cf", root / "one.tar", *names[:20]], check=True)
    subprocess.run(["tar", "-C", root, "-cf", root / "two.tar", "--format=posix", *names[19:]], check=True)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RangeServer]:
    with RangeServer(root) as server:
        yield server


def config(server: RangeServer) -> FetchConfig:
    return FetchConfig(ca_file=str(server.ca_file))


def test_a_directory(root: Path) -> None:
    store = DirectoryStore(root)
    assert store["007.txt"] == (FILES["007.txt"], SourceInfo(str(root), "007.txt", None, ("007.txt",)))
    assert store.size("007.txt") == len(FILES["007.txt"])
    assert DirectoryStore()[str(root / "007.txt")][0] == FILES["007.txt"]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_a_name_cannot_leave_its_root(root: Path, name: str) -> None:
    for store in (DirectoryStore(root), UrlStore("https://data.example.org")):
        with pytest.raises(ConfigError, match="doesn't name a file below"):
            store.read_raw(name)


def test_unreadable_file_of_a_directory_is_an_error_of_ours(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing"):
        DirectoryStore(root)["nothing.txt"]
    with pytest.raises(FetchError, match=r"[Dd]irectory"):
        DirectoryStore(root.parent)[root.name]
    if os.getuid():
        (tmp_path / "closed").write_bytes(b"")
        (tmp_path / "closed").chmod(0)
        with pytest.raises(AccessDenied):
            DirectoryStore(tmp_path)["closed"]


def test_urls(server: RangeServer) -> None:
    with UrlStore(f"{server.url}/?token=secret", config(server), sizes={"007.txt": 3}) as store:
        assert store["007.txt"][0] == FILES["007.txt"]
        assert "secret" not in store.path + repr(store)
        assert (store.size("007.txt"), store.size("008.txt")) == (3, None)
        with pytest.raises(NotFound, match=r"nothing.txt"):
            store["nothing.txt"]
        with ThreadPoolExecutor(8) as threads:
            assert [value for value, _ in threads.map(store.__getitem__, FILES)] == list(FILES.values())
    with pytest.raises(ClosedError):
        store["007.txt"]


def test_a_configuration_that_cannot_be_used_is_said_at_each_use() -> None:
    store = UrlStore("https://data.example.org", FetchConfig(ca_file="/no/such/file"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="/no/such/file"):
            store["a"]


@pytest.mark.parametrize("is_started", [False, True])
def test_an_error_leaves_nothing_to_the_garbage_collector(server: RangeServer, is_started: bool) -> None:
    settings = config(server) if is_started else FetchConfig(ca_file="/no/such/file")
    errors: list[weakref.ref[BaseException]] = []
    gc.disable()
    try:
        with UrlStore(server.url, settings) as store:
            try:
                store["nothing.txt"]
            except (NotFound, ConfigError) as error:
                errors.append(weakref.ref(error))
            assert [error() for error in errors] == [None]
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_urls_survive_fork_and_pickle(server: RangeServer) -> None:
    store = UrlStore(server.url, config(server))
    assert store["007.txt"][0] == FILES["007.txt"]
    child = os.fork()
    if child == 0:
        right = store["008.txt"][0] == FILES["008.txt"]
        store.close()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store["009.txt"][0] == FILES["009.txt"]
    with pickle.loads(pickle.dumps(store)) as other:
        assert other["010.txt"][0] == FILES["010.txt"]
    store.close()


def test_archives_are_read_by_range(server: RangeServer) -> None:
    with TarStore([f"{server.url}/one.tar", f"{server.url}/two.tar"], config(server)) as store:
        names = store.names()
        assert [name for name in names if "/" not in name] == sorted(FILES.keys() - {"019.txt"})
        assert [name for name in names if "/" in name] == ["one.tar/019.txt", "two.tar/019.txt"]
        for name in names:
            content = FILES[name.rpartition("/")[2]]
            assert store.size(name) == len(content)
            assert store[name][0] == content
        assert store["030.txt"][1] == SourceInfo(store.path, "030.txt", "two.tar", ("030.txt",))
        assert store["one.tar/003.txt"][0] == FILES["003.txt"]
        with pytest.raises(FormatError, match=r"in 2 archives .*one.tar/019.txt"):
            store["019.txt"]
        with pytest.raises(NotFound, match=r"no archive has a file '040.txt', of 40 names"):
            store["040.txt"]
        with pickle.loads(pickle.dumps(store)) as other:
            assert other["001.txt"][0] == FILES["001.txt"]


def archive_of(names: str) -> bytes:
    """Members of one letter as name and content."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 600
            archive.addfile(info, io.BytesIO(name.encode() * info.size))
    return written.getvalue()


@pytest.mark.parametrize("told_by", ["a strong ETag", "a weak ETag", "a date", "the size alone"])
def test_replaced_archive_is_not_read_by_the_old_index(told_by: str) -> None:
    def told(version: str) -> Fault | None:
        match told_by:
            case "a strong ETag":
                return None  # the server's own
            case "a weak ETag":
                return Fault(answer_headers={"ETag": f'W/"{version}"'})
            case "a date":
                return Fault(answer_headers={"ETag": None, "Last-Modified": f"Tue, 0{version} Jan 2030 00:00:00 GMT"})
            case _:
                return Fault(answer_headers={"ETag": None, "Last-Modified": None})

    objects, fault = {"a.tar": archive_of("abc")}, told("1")
    with RangeServer(objects, tls=False, fault=lambda _: fault) as server, TarStore(f"{server.url}/a.tar") as store:
        assert store["b"][0] == b"b" * 600
        with pickle.loads(pickle.dumps(store)) as other:
            objects["a.tar"], fault = archive_of("cab" + "d" * 20), told("2")
            for one in (store, other):
                with pytest.raises(ObjectChanged):
                    one.read_raw("b")
                for name in "abcd":
                    assert one[name][0] == name.encode() * 600


def test_a_pickled_index_has_no_secret(root: Path) -> None:
    with RangeServer(root, tls=False) as server, TarStore(f"{server.url}/one.tar?token=hunter2") as store:
        assert store["001.txt"][0] == FILES["001.txt"]
        assert b"hunter2" not in pickle.dumps(store)


@pytest.mark.parametrize("kind", [UrlStore, TarStore])
@pytest.mark.parametrize("place", ["user", "query", "header"])
def test_only_stores_of_one_login_share_a_read(root: Path, kind: type[UrlStore | TarStore], place: str) -> None:
    login = {"user": "bWU6aGlkZGVu", "query": "token=hidden", "header": "hidden"}[place]

    def refuse_strangers(request: ServedRequest) -> Fault | None:
        known = f"{request.headers.get('Authorization')} {request.target} {request.headers.get('Cookie')}"
        return None if login in known else Fault.status(401)

    with RangeServer(root, tls=False, fault=refuse_strangers) as server, CachePool() as pool:
        plain = server.url if kind is UrlStore else f"{server.url}/one.tar"
        urls = {"user": plain.replace("://", "://me:hidden@"), "query": f"{plain}?token=hidden", "header": plain}
        known, wrong = urls[place], urls[place].replace("hidden", "guessed")
        cookies = ("hidden", "hidden", "guessed")
        configs = [FetchConfig(headers={"127.0.0.1": {"Cookie": one}}, trust_env=False) for one in cookies]
        stores = [kind(url, config) for url, config in zip((known, known, wrong), configs, strict=True)]
        first, second = [pool.get_lazy(store, "001.txt") for store in stores[:2]]
        assert first.get() == second.get() == FILES["001.txt"]
        assert pool.statistics().reads == 1
        with pytest.raises(AccessDenied):
            pool.get_lazy(stores[2], "001.txt").get()
        for store in stores:
            shown = repr(store.identity).encode() + pickle.dumps(store.identity) + pickle.dumps(store)
            assert not {word for word in (b"hidden", b"guessed") if word in shown}
            store.close()


def test_archives_through_a_pool(server: RangeServer) -> None:
    with TarStore(f"{server.url}/one.tar", config(server)) as store, CachePool(workers=4) as pool:
        lazies = [pool.get_lazy(KeyedStore(store, f"{number:03}"), ".txt") for number in range(20)] * 2
        assert [lazy.get() for lazy in lazies] == [FILES[f"{number:03}.txt"] for number in range(20)] * 2
        assert pool.statistics().reads == 20


def test_odd_members(tmp_path: Path) -> None:
    path = tmp_path / "odd.tar"
    long_name = "x" * 200 + "/" + "y" * 150
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in (
            ("./dot", b"dot"),
            (long_name, b"long"),
            ("twice", b"old"),
            ("twice", b"new"),
            ("none", b""),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "dot"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("large"), None)
    store = TarStore(path)
    assert {name: store[name][0] for name in store.names()} == {
        "dot": b"dot",
        long_name: b"long",
        "twice": b"new",
        "none": b"",
        "large": b"",
    }
    store.close()


@pytest.mark.parametrize("damage", ["compressed", "cut short", "empty", "no archive"])
def test_a_broken_archive_is_named(root: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "broken.tar"
    whole = (root / "two.tar").read_bytes()
    match damage:
        case "compressed":
            subprocess.run(["tar", "-C", root, "-czf", path, "001.txt"], check=True)
        case "cut short":
            path.write_bytes(whole[: len(whole) // 2])
        case "empty":
            path.write_bytes(b"")
        case _:
            path.write_bytes(b"not a tar archive at all" * 100)
    with TarStore(path) as store:
        for _ in range(2):
            with pytest.raises(FormatError, match=r"broken\.tar"):
                store["001.txt"]


def header(name: str, size: bytes = b"00000000000\0", *, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header with just these bytes as its size, and the right checksum."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(records: dict[str, str], content: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.size, info.pax_headers = len(content), records
        archive.addfile(info, io.BytesIO(content))
    return written.getvalue()


BACKWARDS = b"\xff" + (256**11 - 512).to_bytes(11, "big")
HUGE = b"\x80" + b"\xff" * 11
DAMAGED = {
    "negative": header("x") + header("a", BACKWARDS),
    "negative_name": header("x", BACKWARDS, kind=tarfile.GNUTYPE_LONGNAME),
    "huge_name": header("x", HUGE, kind=tarfile.GNUTYPE_LONGNAME),
    "names_of_names": header("x", kind=tarfile.GNUTYPE_LONGNAME) * 5000,
    "second_header": header("x") + b"no header at all" * 32 + header("y"),
    "half_a_header": header("x") + header("y")[:200],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.tar"
    path.write_bytes(DAMAGED[name] + bytes(1024 if name != "half_a_header" else 0))
    with TarStore(path) as store, pytest.raises(FormatError, match=rf"{name}\.tar"):
        store.names()


def test_headers_that_lie_across_what_is_read_at_once_are_found(tmp_path: Path) -> None:
    path = tmp_path / "many.tar"
    with tarfile.open(path, "w") as archive:
        large = tarfile.TarInfo("large")
        large.size = 1_000_000
        archive.addfile(large, io.BytesIO(bytes(large.size)))
        for number in range(200):
            archive.addfile(tarfile.TarInfo(f"empty {number}"))
    with TarStore(path) as store:
        assert store.names() == ["large", *(f"empty {number}" for number in range(200))]


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_members_are_left_out(root: Path, tmp_path: Path, form: str) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**20)
        file.seek(2**19)
        file.write(b"data")
    path = tmp_path / "a.tar"
    into = ["tar", "-S", f"--format={form}", "-cf", str(path)]
    subprocess.run([*into, "-C", tmp_path, "sparse", "-C", root, "007.txt"], check=True)
    with TarStore(path) as store:
        assert store.names() == ["007.txt"]
        assert store["007.txt"][0] == FILES["007.txt"]


NEW_SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "3"}


@pytest.mark.parametrize(
    "archive",
    [
        pax({"GNU.sparse.map": "0,x", "GNU.sparse.size": "3"}, b"abc"),
        pax(NEW_SPARSE, b"abc\nzz"),
        pax({**NEW_SPARSE, "GNU.sparse.realsize": "x"}, b"0\n"),
    ],
)
def test_damaged_maps_of_sparse_members_are_never_read(tmp_path: Path, archive: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(archive)
    with TarStore(path) as store:
        assert store.names() == []


def test_impossible_name_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"isn't a url: check its host") as caught:
        TarStore("https://user:secret@[bad/x.tar")
    assert "secret" not in str(caught.value)
    for name in ("a\0b", "\ud800"):
        for store in (DirectoryStore(), DirectoryStore(tmp_path)):
            with pytest.raises(ConfigError):
                store.read_raw(name)
            with pytest.raises(ConfigError):
                store.size(name)


def test_two_archives_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two archives are called 'a\.tar'"):
        TarStore(["/x/a.tar", "/y/a.tar"])
    with pytest.raises(ConfigError, match="at least one"):
        TarStore([])


def test_failed_index_may_be_asked_for_again_at_once(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    members, again = remote._members, []
    with TarStore(f"{server.url}/one.tar", config(server)) as store:

        def fail_once(*arguments: Any) -> Any:  # noqa: ANN401
            monkeypatch.setattr(remote, "_members", members)
            # It is called where those who wait are told.
            store._searches[os.getpid()].add_done_callback(lambda _: again.append(store["003.txt"][0]))
            raise FetchError("of the first attempt")

        monkeypatch.setattr(remote, "_members", fail_once)
        with pytest.raises(FetchError, match="of the first attempt"):
            store.names()
        assert again == [FILES["003.txt"]]
