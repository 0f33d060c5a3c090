"""What a configuration keeps to itself, when it is shown, copied, pickled, and handed to a worker."""

from __future__ import annotations

import base64
import copy
import multiprocessing
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from torch.utils.data import DataLoader

import asyncfetch as af
from asyncfetch.config import Secrets
from asyncfetch.lerobot.dataset import LeRobotFormat
from asyncfetch.stream.epoch_stream import source_of
from asyncfetch.testing import Fault, HubServer, RangeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncfetch.stream import SampleSource
    from asyncfetch.testing import DatasetTruth, ServedRequest

HEADERS = {"127.0.0.1": {"Cookie": "hidden-cookie", "X-Api-Key": "hidden-key"}}
TOKENS = {"127.0.0.1": "hidden-token"}
FSSPEC = {"dir": {"path": "/tmp", "target_protocol": "file", "password": "hidden-password"}}
CONFIG = af.FetchConfig(headers=HEADERS, tokens=TOKENS, fsspec=FSSPEC, max_redirects=3, trust_env=False)


def refuse_strangers(request: ServedRequest) -> Fault | None:
    sent = request.headers
    known = sent.get("Authorization") == "Bearer hidden-token" and sent.get("X-Api-Key") == "hidden-key"
    return None if known else Fault.status(401)


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with RangeServer({"x": b"0123456789"}, tls=False, fault=refuse_strangers) as server:
        yield server


def read(config: af.FetchConfig, url: str) -> bytes:
    async def fetch() -> bytes:
        async with af.Fetcher(config) as fetcher:
            return bytes(await fetcher.fetch(url, 2, 5))

    return anyio.run(fetch)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_pickle_carries_a_value(protocol: int) -> None:
    pickled = pickle.dumps(af.StreamConfig(fetch=CONFIG), protocol)
    assert b"hidden" not in pickled
    again = pickle.loads(pickled).fetch
    assert replace(again, headers={}, tokens={}, fsspec={}) == replace(CONFIG, headers={}, tokens={}, fsspec={})
    assert list(again.tokens) == ["127.0.0.1"]


def test_holders_of_a_configuration_carry_no_secret(small_dataset: DatasetTruth) -> None:
    config = af.StreamConfig(fetch=CONFIG)
    stream = af.Stream(str(small_dataset.root), config=config)
    holders = [stream, af.torch.StreamDataset(stream), af.torch.FrameDataset(str(small_dataset.root), config=config)]
    for holder in holders:
        assert b"hidden" not in pickle.dumps(pickle.loads(pickle.dumps(holder)))
        assert "hidden" not in repr(holder)


def test_no_repr_shows_a_value() -> None:
    shown = repr(CONFIG) + repr(CONFIG.tokens) + repr(CONFIG.headers) + str(CONFIG.fsspec)
    assert "hidden" not in shown
    assert repr(CONFIG.tokens) == "<tokens for 127.0.0.1>"


def test_secret_missing_from_a_pickle_is_an_error_at_once(server: RangeServer) -> None:
    again: af.FetchConfig = pickle.loads(pickle.dumps(CONFIG))
    with pytest.raises(af.ConfigError, match=r"headers\['127.0.0.1'\] stayed behind .*replace\(config, headers="):
        read(again, f"{server.url}/x")
    assert server.requests == []
    assert read(replace(again, headers=HEADERS, tokens=TOKENS), f"{server.url}/x") == b"234"


def test_a_host_that_had_no_secret_is_read_as_ever() -> None:
    with RangeServer({"x": b"0123456789"}, host="127.0.0.2", tls=False) as other:
        assert read(pickle.loads(pickle.dumps(CONFIG)), f"{other.url}/x") == b"234"


def test_arguments_of_a_file_system_stay_behind_too() -> None:
    again: af.FetchConfig = pickle.loads(pickle.dumps(CONFIG))
    with pytest.raises(af.ConfigError, match=r"fsspec\['dir'\] stayed behind"):
        read(again, "dir://x")


def test_pickling_it_again_does_not_bring_it_back_nor_hide_it() -> None:
    twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(CONFIG))))
    with pytest.raises(af.ConfigError, match="stayed behind"):
        twice.tokens["127.0.0.1"]
    assert twice == pickle.loads(pickle.dumps(CONFIG)) != CONFIG


def test_copies_in_this_process_are_whole() -> None:
    for again in (copy.copy(CONFIG), copy.deepcopy(CONFIG), replace(CONFIG), replace(CONFIG, max_redirects=3)):
        assert again == CONFIG
        assert again.tokens["127.0.0.1"] == "hidden-token"


def test_secrets_are_a_mapping() -> None:
    secrets = Secrets("tokens", {"a": "1", "b": "2"})
    assert (dict(secrets), len(secrets), "a" in secrets, "c" in secrets) == ({"a": "1", "b": "2"}, 2, True, False)
    assert secrets == {"a": "1", "b": "2"}
    assert secrets.get("c", "none") == "none"
    with pytest.raises(KeyError):
        secrets["c"]
    left: Secrets[str] = pickle.loads(pickle.dumps(secrets))
    assert (list(left), "a" in left, "c" in left, left.get("c")) == (["a", "b"], True, False, None)
    assert pickle.loads(pickle.dumps(Secrets("tokens", {}))) == {}


@pytest.mark.parametrize("value", ["hidden", None, ["hidden"]])
def test_value_that_is_no_mapping_is_refused_and_not_shown(value: Any) -> None:  # noqa: ANN401
    with pytest.raises(af.ConfigError, match="tokens must be a mapping") as caught:
        af.FetchConfig(tokens=value)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(("kind", "setting"), [(af.FetchConfig, "hub_endpoint"), (af.S3Config, "endpoint_url")])
def test_an_endpoint_holds_no_password(kind: Any, setting: str) -> None:  # noqa: ANN401
    with pytest.raises(af.ConfigError, match=f"{setting} must not hold a password") as caught:
        kind(**{setting: "https://me:hidden@example.org/"})
    assert "hidden" not in str(caught.value)


def _read_in_child(config: af.FetchConfig, url: str, answers: Any) -> None:  # noqa: ANN401
    try:
        answers.send(read(config, url))
    except af.AsyncFetchError as error:
        answers.send(error)


@pytest.mark.usefixtures("programs_are_warm")
def test_secrets_reach_a_process_of_its_multiprocessing(server: RangeServer) -> None:
    """Of a fork server; a spawned one is a loader's worker, below."""
    context: Any = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_read_in_child, args=(CONFIG, f"{server.url}/x", sender))
    process.start()
    assert receiver.poll(15)
    assert receiver.recv() == b"234"
    process.join(10)


def test_configuration_sent_to_a_running_process_has_no_secret(server: RangeServer) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(CONFIG)
    with pytest.raises(af.ConfigError, match="stayed behind"):
        read(receiver.recv(), f"{server.url}/x")


class _Reads:
    """A map-style dataset: what each url reads as with its configuration, in whichever process asks."""

    def __init__(self, reads: list[tuple[af.FetchConfig, str]]) -> None:
        self.reads = reads

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> bytes:
        return read(*self.reads[index])


@pytest.mark.usefixtures("programs_are_warm")
def test_secrets_reach_a_loaders_spawned_worker(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    with HubServer(token="hub-token") as hub:
        hub.push("datasets/org/name", {"x": b"0123456789"})
        of_the_hub = af.FetchConfig(ca_file=hub.ca_file, hub_endpoint=hub.url)
        dataset: Any = _Reads([(CONFIG, f"{server.url}/x"), (of_the_hub, "hf://datasets/org/name/x")])
        loader: Any = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
        assert list(loader) == [b"234", b"234"]


LOGIN = "Basic " + base64.b64encode(b"me:hidden").decode()


def refuse_other_logins(request: ServedRequest) -> Fault | None:
    sent = request.headers
    known = sent.get("Authorization") == LOGIN and sent.get("X-Api-Key") == "hidden-key"
    return None if known else Fault.status(401)


def url_of(source: SampleSource) -> object:
    reading = source.members[0].format
    assert isinstance(reading, LeRobotFormat)
    return reading.source


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("https://me:hidden@host/a", "https://***@host/a"),
        ("HTTPS://hidden@host/a", "HTTPS://***@host/a"),
        ("https://host/a?X-Amz-Signature=hidden&b=1", "https://host/a?X-Amz-Signature=***&b=1"),
        ("sftp://me:hidden@host/a?b", "sftp://***@host/a?b"),
        ("zip://a::sftp://me:hid@den@host/a", "zip://a::sftp://***@host/a"),
        ("https://me:hid den@host/a", "https://***@host/a"),
        ("https://host/a?my token=hid den&b=1", "https://host/a?my token=***&b=1"),
        ("sftp://me:hid den@host/a?b", "sftp://***@host/a?b"),
    ],
)
def test_a_urls_own_secrets_stay_behind_and_are_missed(url: str, left: str) -> None:
    for holder in (af.Stream(url), af.torch.FrameDataset(url), af.UrlStore(url), af.TarStore([url])):
        assert b"hidden" not in pickle.dumps(holder)
        assert "hid" not in repr(holder)
    again = url_of(source_of(pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(af.Stream(url)))))))
    assert again == left
    with pytest.raises(af.ConfigError, match="has lost its password or signature"):
        read(af.FetchConfig(), again)


@pytest.mark.parametrize("url", ["sftp://me@host/a", "s3://bucket/a?token=b", "hf://datasets/a/b@c", "/a/b;key=d@e"])
def test_url_without_secrets_is_pickled_whole(url: str) -> None:
    stream = af.Stream(url)
    for again in (pickle.loads(pickle.dumps(stream)), copy.deepcopy(stream), copy.copy(stream)):
        assert url_of(source_of(again)) == url


def test_copies_of_a_url_are_whole() -> None:
    stream = af.Stream("https://me:hidden@host/a")
    for again in (copy.copy(source_of(stream)), source_of(copy.deepcopy(stream)), source_of(stream).shared_by(2)):
        assert url_of(again) == "https://me:hidden@host/a"


@pytest.mark.usefixtures("programs_are_warm")
def test_secrets_reach_a_streams_spawned_processes(small_dataset: DatasetTruth) -> None:
    config = af.StreamConfig(fetch=replace(CONFIG, tokens={}))
    with RangeServer(small_dataset, tls=False, fault=refuse_other_logins) as server:
        stream = af.Stream(server.url.replace("://", "://me:hidden@"), features=["action"], config=config)
        loader: Any = DataLoader(
            af.torch.StreamDataset(stream), batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        assert len(list(loader)) == small_dataset.num_frames
        with af.serve_samples(stream, batch_size=small_dataset.num_frames) as batches:
            assert len(list(batches)) == 1
        assert {request.status for request in server.requests} <= {200, 206}


def test_error_of_a_large_index_lacks_the_urls_password(small_dataset: DatasetTruth) -> None:
    with RangeServer(small_dataset, tls=False) as server:
        frames = af.torch.FrameDataset(server.url.replace("://", "://me:hidden@"))
        with pytest.raises(IndexError, match=f"among the {small_dataset.num_frames} frames") as caught:
            frames[small_dataset.num_frames]
        frames.close()
    assert "hidden" not in str(caught.value)
