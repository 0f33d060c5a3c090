"""A report of a consumer's bottleneck, and the setting to change: a page to read, and the same as numbers. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from asyncfetch.config import MemoryShares, usable_cpus
from asyncfetch.observe.waits import Cause, Waits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncfetch.config import StreamConfig

MIB = 1024 * 1024
GIB = 1024 * MIB
PAGE_COLUMNS = 80
TRAINER_SHARE = 0.9
"""A share of the time. A consumer that is busy for more gains a tenth at most from any setting."""
IDLE_SHARE = 0.3
"""A share of a loader's workers' time. They make batches ahead, so if they're idle for more, the trainer binds."""
LOOP_SHARE = 0.7
"""A share of the time. A loop that is busy for more is late at everything."""
LOOP_RAN_SHARE = 0.15
"""A share of the time. A loop that runs for less takes no core from the threads that decode. In tests, TLS that takes a
core had 0.19 to 0.49, and everything else 0.03 to 0.11."""
HUGE_WAIT_SHARE, HUGE_TIMES = 0.4, 4.0
"""A segment's episode binds if this share of the wait was for it, and it takes this many times as much as others."""
WAITING_CORES, PARALLEL_CORES = 0.5, 1.3
"""Bounds on the cores that a process's transforms run on or wait for, and on those that they run on. Transforms that
hold the GIL keep one core busy together. Those that keep more busy release it; those that keep less busy, and don't
wait for a core, wait for something else. In tests, transforms that sleep had 0.1 to 0.4 of the first, and all others
1.1 to 1.6; the second is a core and a margin, without a test."""
_NETWORK = (Cause.LIMIT, Cause.FIRST_BYTE, Cause.BODIES)
_WORDS = {
    Cause.OPENING: "metadata and indexes",
    Cause.LIMIT: "a limit or quota of requests",
    Cause.FIRST_BYTE: "the first bytes of responses",
    Cause.BODIES: "the bodies of responses, so the link",
    Cause.RETRIES: "failed requests and the pauses after them",
    Cause.ROOM: "room in memory",
    Cause.DISK: "the disk",
    Cause.DECODING: "decoding",
    Cause.TRANSFORM: "the transform",
    Cause.HAND_OVER: "making batches and handing them over",
    Cause.OUTAGE: "a host that was away",
}
_ADVICE = {
    Cause.OPENING: "pay this once: keep the stream for all epochs, and loader workers by persistent_workers=True",
    Cause.RETRIES: "send fewer requests at a time to a host that refuses, or fix it",
    Cause.DISK: "use a faster disk, or more memory (max_bytes)",
    Cause.HAND_OVER: "make your collate_fn faster, if you have one; StreamDataset(batch_size=...) copies nothing "
    "without collate_fn and transform",
    Cause.OUTAGE: "find out why it goes away; what is in memory goes on meanwhile",
}
"""Advice for causes without a setting to propose."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a format for what a stream reads of it. By default they are those of episodes with cameras."""

    entry: str = "episode"
    """A name for a stream's episode."""
    entries: str = "episodes"
    """The plural of that."""
    samples: str = "frames"
    """A name for an episode's frames."""
    ranges: str = "clips"
    """A name for the bytes of a segment in memory."""
    fewer_requests: str = "fewer and longer requests: longer segments (segment_seconds), fewer cameras (features=)"
    """The thing to ask a host for that has a quota."""
    less_decoding: str = "read fewer cameras (features=), store smaller pictures, or use more cores"
    """Advice where decode threads are busy."""
    smaller_segments: str = "cut it smaller by segment_seconds"
    """Advice for an entry of which a segment is huge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The bottleneck."""

    binds: str
    """A cause's key; or "trainer", "loop" (its core), "episode" (a huge one), "worker" (one that is lost, or stands
    still), "nothing" before the first pass."""
    evidence: str
    """The figures that show it."""
    advice: str = ""
    """Advice in words."""
    setting: Mapping[str, int] = field(default_factory=dict)
    """The one setting to change: its name and value, "fetch." in front of one of FetchConfig, or ``num_workers``."""
    gain: float = 1.0
    """Expected ratio of samples a second with that setting to those without; 1 without a setting."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The reasons why a pass's consumer waits, as a snapshot. ``str`` is a page, ``repr`` a line."""

    waits: Waits
    """The consumer's time, by cause."""
    verdict: Diagnosis
    statistics: Any = None
    """DatasetStatistics of the pass alone, with opening the dataset if the pass did that; None if unknown."""
    num_workers: int = 0
    """Number of loader workers, if they are the consumers; 0 if the trainer is."""
    all_waits: Waits = field(default_factory=Waits)
    """The time including earlier passes, for counters that only grow: see ``asyncfetch.prometheus``."""
    all_statistics: Any = None
    """DatasetStatistics since the dataset was opened."""

    @classmethod
    def of(
        cls,
        waits: Waits,
        statistics: Any,  # noqa: ANN401
        config: StreamConfig,
        *,
        num_workers: int = 0,
        all_waits: Waits | None = None,
        all_statistics: Any = None,  # noqa: ANN401
        failure: str = "",
        silence: str = "",
    ) -> Report:
        """The report of these figures of a pass. For workers they are sums, and ``config`` is the rank's.

        ``all_waits`` and ``all_statistics`` are those of all passes, None if this is the first; ``failure`` says which
        error ended the pass, and ``silence`` how a process that reads for this one has ended, is stopped, or hangs.
        """
        verdict = _Judge(waits, statistics, config, num_workers).verdict()
        if waits.consumers and not waits.samples:
            verdict = Diagnosis(binds=verdict.binds, evidence=f"no sample has come; {verdict.evidence}")
        if silence:
            verdict = Diagnosis(binds="worker", evidence=silence)
        elif failure:
            verdict = replace(verdict, evidence=f"the pass ended by {failure}; {verdict.evidence}")
        return cls(
            waits=waits,
            verdict=verdict,
            statistics=statistics,
            num_workers=num_workers,
            all_waits=waits if all_waits is None else all_waits,
            all_statistics=statistics if all_statistics is None else all_statistics,
        )

    @property
    def seconds(self) -> float:
        """The time it took; for workers, which run side by side, the mean."""
        return self.waits.wall_seconds / max(1, self.waits.consumers)

    @property
    def samples_per_second(self) -> float:
        """Samples delivered, over all of the time."""
        return self.waits.samples / self.seconds if self.seconds else 0.0

    @property
    def waited_share(self) -> float:
        """The share of the time that the consumer waited; for workers, that at most they had no batch ready."""
        return (
            1 - _own_seconds(self.waits, self.num_workers) / self.waits.wall_seconds if self.waits.wall_seconds else 0.0
        )

    def as_dict(self) -> dict[str, float]:
        """Flat names and numbers, for logs."""
        waits = self.waits
        numbers = {
            "samples": float(waits.samples),
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "waited_share": self.waited_share,
            "busy_share": _share(waits.busy_seconds, waits),
            "loop_busy_share": _share(waits.loop_busy_seconds, waits),
            "loop_ran_share": _share(waits.loop_ran_seconds, waits),
            "expected_gain": self.verdict.gain,
        }
        numbers |= {f"wait_share_{cause.key}": _share(waits.by_cause.get(cause, 0.0), waits) for cause in Cause}
        if self.statistics is not None:
            fetch, decode = self.statistics.fetch, self.statistics.decode
            numbers |= {
                "fetched_bytes": float(fetch.bytes),
                "requests": float(fetch.requests),
                "retries": float(fetch.retries),
                "throttled": float(fetch.throttled),
                "outages": float(fetch.outages),
                "first_byte_p50_seconds": fetch.first_byte.p50_seconds,
                "first_byte_p99_seconds": fetch.first_byte.p99_seconds,
                "decode_threads": float(decode.threads),
                "decode_busy_seconds": decode.busy_seconds,
            }
        return numbers

    def __repr__(self) -> str:
        return (
            f"Report({self.waits.samples} samples, {self.samples_per_second:.1f}/s, waited {self.waited_share:.0%}, "
            f"binds={self.verdict.binds!r})"
        )

    def __str__(self) -> str:
        waits, verdict = self.waits, self.verdict
        if not waits.consumers:
            return verdict.evidence
        waited = f"the consumer waited {self.waited_share:.0%} of the time"
        if self.num_workers:  # they have batches ahead, so the trainer waits less
            others = f" of {self.num_workers}" if waits.consumers < self.num_workers else ""
            workers = f"{waits.consumers}{others} worker{'s' * (self.num_workers > 1)}"
            waited = f"{workers} had no batch ready for at most {self.waited_share:.0%} of the time"
        rate = f"{waits.samples:,} samples in {self.seconds:.1f} s: {self.samples_per_second:.1f} samples/s"
        lines = [f"{rate}; {waited}"]
        parts = [(seconds, _WORDS[cause]) for cause, seconds in waits.by_cause.items()]
        idle = _own_seconds(waits, self.num_workers)
        parts += [(idle, f"nothing: {'the trainer' if self.num_workers else 'the consumer'} was busy")]
        if self.num_workers:
            parts += [(waits.busy_seconds - idle, "collating and handing over in the worker")]
        for seconds, words in sorted(parts, reverse=True):
            if _share(seconds, waits) >= 0.005:  # less rounds to 0 %
                lines.append(f"  {_share(seconds, waits):4.0%}  {words}")
        is_named = verdict.binds != "nothing"
        lines.append(f"bottleneck: {verdict.binds}. {verdict.evidence}" if is_named else verdict.evidence)
        if verdict.setting:
            [(name, value)] = verdict.setting.items()
            lines.append(f"set {name}={value:_} for about {verdict.gain:.2g} times as many samples/s")
        if verdict.advice:
            lines.append(verdict.advice)
        if (refused := _refused(self.statistics)) not in verdict.evidence:
            lines.append(refused)
        if (whole := _read_whole(self.statistics)) != "":
            lines.append(whole)
        return "\n".join(
            textwrap.fill(line, PAGE_COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            for line in lines
        )


def _refused(statistics: Any) -> str:  # noqa: ANN401
    """The reason why the disk cache takes no more, in words; empty if it does, or without one."""
    disk = None if statistics is None else statistics.disk
    return f"the disk cache takes no more: {disk.refusal}" if disk is not None and disk.refusal else ""


def _read_whole(statistics: Any) -> str:  # noqa: ANN401
    """What files cost that can't be cut, in words; empty if there are none."""
    episodes = None if statistics is None else statistics.episodes
    if episodes is None or not episodes.whole:
        return ""
    return (
        f"{episodes.whole:,} clips needed all of a file that can't be cut, {episodes.whole_bytes / MIB:,.0f} MiB "
        "together; the log names them: remux them as MP4 (ffmpeg -i IN -c copy OUT.mp4), or decompress them"
    )


def _share(seconds: float, waits: Waits) -> float:
    return seconds / waits.wall_seconds if waits.wall_seconds else 0.0


def _own_seconds(waits: Waits, num_workers: int) -> float:
    """The consumer's own time; for workers, the time in which the trainer didn't ask for more."""
    return max(0.0, waits.busy_seconds - waits.working_seconds) if num_workers else waits.busy_seconds


class _Judge:
    """The rules, from sure to likely. The time before the first sample counts only in a short run."""

    def __init__(self, waits: Waits, statistics: Any, config: StreamConfig, num_workers: int) -> None:  # noqa: ANN401
        self._waits, self._seen, self._config, self._workers = waits, statistics, config, num_workers
        self._cores = usable_cpus()
        self._seconds, self._wall_seconds = dict(waits.by_cause), waits.wall_seconds
        self._when = "of the time"
        start_seconds = sum(waits.start_by_cause.values())
        if waits.wall_seconds > 2 * start_seconds:
            self._wall_seconds -= start_seconds
            if start_seconds > 0.05 * waits.wall_seconds:  # else it makes no difference
                self._when += " after the first sample"
            self._seconds = {
                cause: part - waits.start_by_cause.get(cause, 0.0) for cause, part in self._seconds.items()
            }

    @property
    def _words(self) -> Words:
        episodes = None if self._seen is None else self._seen.episodes
        return Words() if episodes is None else episodes.words

    def _share(self, seconds: float) -> float:
        return seconds / self._wall_seconds if self._wall_seconds else 0.0

    def verdict(self) -> Diagnosis:
        waits = self._waits
        if not waits.consumers:
            return Diagnosis(binds="nothing", evidence="no pass has begun in this process")
        own = waits.least_idle_share if self._workers else self._share(waits.busy_seconds)
        if own >= (IDLE_SHARE if self._workers else TRAINER_SHARE):
            subject = "all workers stood still" if self._workers else "the consumer was busy"
            return Diagnosis(binds="trainer", evidence=f"{subject} for {own:.0%} {self._when}; nothing to do here")
        seconds = self._seconds
        if self._workers:  # they assemble batches between two samples
            seconds[Cause.HAND_OVER] = seconds.get(Cause.HAND_OVER, 0.0) + waits.working_seconds
        network = sum(seconds.get(cause, 0.0) for cause in _NETWORK)
        others = {cause: value for cause, value in seconds.items() if cause not in _NETWORK}
        cause = max(others, key=others.__getitem__, default=Cause.OPENING)
        if network > others.get(cause, 0.0):
            return self._of_network(seconds, network)
        return self._of(cause, others.get(cause, 0.0))

    def _gain(self, seconds: float, times: float) -> float:
        """The gain if the bottleneck, which takes ``seconds``, gets ``times`` as fast, and nothing else does."""
        share = self._share(seconds)
        own = self._share(_own_seconds(self._waits, self._workers))
        return 1 / max(own, 1 - share * (1 - 1 / times), 1e-3)

    def _of_network(self, seconds: Mapping[Cause, float], network: float) -> Diagnosis:
        waits, config, seen = self._waits, self._config, self._seen
        found = f"{self._share(network):.0%} {self._when} went into waiting for hosts"
        if seen is None:
            cause = max(_NETWORK, key=lambda one: seconds.get(one, 0.0))
            return Diagnosis(binds=cause.key, evidence=found)
        fetch = seen.fetch
        origin, host = max(fetch.hosts.items(), key=lambda item: item[1].bytes, default=("", None))
        rate = fetch.bytes * max(1, waits.consumers) / max(waits.wall_seconds, 1e-9)
        found += f", {rate / MIB:.1f} MiB/s"
        loop = _share(waits.loop_busy_seconds, waits)
        huge = self._huge(network)
        if huge is not None:
            return huge
        if seen.disk is not None and seen.disk.misses > seen.disk.hits and seen.disk.refusal:
            evidence = f"{found}, because {_refused(seen)}"
            return Diagnosis(
                binds=Cause.DISK.key, evidence=evidence, advice="see to it, or choose another disk_cache_dir"
            )
        if seen.disk is not None and seen.disk.misses > seen.disk.hits:
            return Diagnosis(
                binds=Cause.DISK.key,
                evidence=f"{found}, because the disk cache is cold: {seen.disk.misses} reads missed it, "
                f"{seen.disk.hits} hit it",
                advice="the next epoch reads from it what fits into disk_cache_max_bytes, which is "
                f"{config.disk_cache_max_bytes / GIB:.1f} GiB; to fill it in advance, copy it or read the dataset once",
            )
        if loop >= LOOP_SHARE:
            return self._of_loop(found, loop)
        limit_share = seconds.get(Cause.LIMIT, 0.0) / network
        if config.fetch.max_bytes_per_second is not None and rate >= 0.8 * config.fetch.max_bytes_per_second:
            return Diagnosis(
                binds=Cause.LIMIT.key,
                evidence=f"{found}; max_bytes_per_second is {config.fetch.max_bytes_per_second / MIB:.1f} MiB/s",
                advice="raise FetchConfig(max_bytes_per_second=...) if the link is yours",
            )
        if limit_share >= 0.5 and host is not None:
            if fetch.throttled:
                return Diagnosis(
                    binds=Cause.LIMIT.key,
                    evidence=f"{found}; {origin} has a quota: {fetch.throttled} of {fetch.requests} requests were "
                    f"throttled, {self._share(seconds.get(Cause.LIMIT, 0.0)):.0%} of the time was waiting for it",
                    advice=f"ask for a larger quota, or for {self._words.fewer_requests}",
                )
            if host.wait.count and host.limit >= config.fetch.max_requests_per_host // max(1, self._workers):
                return Diagnosis(
                    binds=Cause.LIMIT.key,
                    evidence=f"{found}; max_requests_per_host allows only {host.limit} requests at a time, and half of "
                    f"them waited {host.wait.p50_seconds * 1e3:.0f} ms for their turn",
                    setting={"fetch.max_requests_per_host": 2 * config.fetch.max_requests_per_host},
                    gain=self._gain(network, 2),
                )
        body, first = seconds.get(Cause.BODIES, 0.0), seconds.get(Cause.FIRST_BYTE, 0.0)
        if body + first <= 0:
            body, first = fetch.body.sum_seconds, fetch.first_byte.sum_seconds
        cause = Cause.BODIES if body >= first else Cause.FIRST_BYTE
        if cause is Cause.BODIES:
            streams = fetch.body.sum_seconds * max(1, waits.consumers) / max(waits.wall_seconds, 1e-9)
            evidence = f"{found}; a response had {fetch.bytes / max(fetch.body.sum_seconds, 1e-9) / MIB:.2f} MiB/s, "
            evidence += f"{streams:.1f} of them at a time"
        else:
            evidence = f"{found}; first bytes took {fetch.first_byte.p50_seconds * 1e3:.0f} ms "
            evidence += f"(p99 {fetch.first_byte.p99_seconds * 1e3:.0f} ms)"
        if host is None:
            return Diagnosis(binds=cause.key, evidence=evidence)
        if host.peak_in_flight * 2 >= host.limit or config.prefetch_segments >= 64:
            return Diagnosis(binds=cause.key, evidence=evidence, advice="no setting helps: more requests aren't faster")
        more = max(2, 2 * config.prefetch_segments)
        return Diagnosis(
            binds=cause.key,
            evidence=f"{evidence}; at most {host.peak_in_flight} of {host.limit} possible requests ran at a time",
            setting={"prefetch_segments": more},
            gain=self._gain(network, 2),
        )

    def _huge(self, network: float) -> Diagnosis | None:
        waits, words = self._waits, self._words
        is_huge = waits.largest_bytes >= HUGE_TIMES * waits.other_bytes > 0
        is_huge = is_huge and waits.longest_wait_episode == waits.largest_episode
        if not is_huge or waits.longest_wait_seconds < HUGE_WAIT_SHARE * max(waits.waited_seconds, network):
            return None
        return Diagnosis(
            binds="episode",
            evidence=f"{_share(waits.longest_wait_seconds, waits):.0%} of the whole time went into waiting for "
            f"{words.entry} {waits.longest_wait_episode}, a segment of which has {waits.largest_bytes / MIB:.0f} MiB; "
            f"others have {waits.other_bytes / MIB:.1f}",
            advice=f"{words.smaller_segments}, or leave it out with episodes=; more prefetch_segments start it earlier",
        )

    def _of_loop(self, found: str, loop: float) -> Diagnosis:
        """The verdict for a busy loop. No setting: with all cores in use, one more loop has no effect."""
        ran = _share(self._waits.loop_ran_seconds, self._waits)
        hosts = {} if self._seen is None else self._seen.fetch.hosts
        tls = "spare it TLS by http://, from a host in a network that you trust; "
        return Diagnosis(
            binds="loop",
            evidence=f"{found}; the loop's thread, which sends requests and reads answers, TLS included, ran for "
            f"{ran:.0%} of the whole time, and ran or waited for a core for {loop:.0%}",
            advice=(tls if any(origin.startswith("https:") for origin in hosts) else "")
            + "where cores are idle, loader workers (num_workers) or serve_samples have loops of their own",
        )

    def _of(self, cause: Cause, seconds: float) -> Diagnosis:
        share = f"{self._share(seconds):.0%} {self._when} went into {_WORDS[cause]}"
        match cause:
            case Cause.ROOM:
                return self._of_room(seconds, share)
            case Cause.DECODING:
                return self._of_decoding(seconds, share)
            case Cause.TRANSFORM:
                return self._of_transform(seconds, share)
        return Diagnosis(binds=cause.key, evidence=share + self._details(cause), advice=_ADVICE[cause])

    def _details(self, cause: Cause) -> str:
        seen = self._seen
        if seen is None:
            return ""
        if cause is Cause.RETRIES:
            fetch = seen.fetch
            return f": {fetch.errors} of {fetch.requests} requests failed, {fetch.throttled} of them refused (503, 429)"
        if cause is Cause.OUTAGE:
            away = [f"{origin} {host.outages} times" for origin, host in seen.fetch.hosts.items() if host.outages]
            return f": {', '.join(away[:3])}" if away else ""
        if cause is Cause.DISK and seen.disk is not None:
            return f": {seen.disk.hits} reads hit the disk cache, {seen.disk.misses} missed it"
        return ""

    def _of_room(self, seconds: float, share: str) -> Diagnosis:
        config, waits = self._config, self._waits
        needed = waits.mean_bytes * (config.pool_segments + config.prefetch_segments) * 1.25 + waits.largest_bytes
        memory = MemoryShares.of(config)
        value = max(2 * memory.max_bytes, memory.max_bytes_for_pool(ceil(needed)))
        # Segments fetched ahead hide the waits for their indexes and first bytes, too.
        hidden = self._seconds.get(Cause.OPENING, 0.0) + self._seconds.get(Cause.FIRST_BYTE, 0.0)
        gain = self._gain(seconds + hidden, 1e6)
        if self._seen is not None and self._seen.episodes.misses:
            # At most the pool and those ahead are fetched at a time, each by an index, then a clip.
            fetch, episodes = self._seen.fetch, self._seen.episodes
            episode_seconds = 2 * fetch.first_byte.p50_seconds + fetch.body.p50_seconds
            episodes_per_second = (episodes.misses - episodes.kept) / max(self._wall_seconds, 1e-9)
            at_a_time = config.pool_segments + config.prefetch_segments
            gain = max(1.0, min(gain, at_a_time / max(episode_seconds * episodes_per_second, 1e-9)))
        return Diagnosis(
            binds=Cause.ROOM.key,
            evidence=f"{share}: the {self._words.ranges} of {config.pool_segments} segments in the pool and "
            f"{config.prefetch_segments} ahead, of {waits.mean_bytes / MIB:.1f} MiB each, don't fit in "
            f"max_bytes={memory.max_bytes / MIB:.0f} MiB",
            setting={"max_bytes": value},
            gain=gain,
        )

    def _of_decoding(self, seconds: float, share: str) -> Diagnosis:
        binds = Cause.DECODING.key
        decode = None if self._seen is None else self._seen.decode
        threads = 0 if decode is None else decode.threads
        if decode is not None:
            share += f"; {threads} threads took {decode.call.p50_seconds * 1e3:.0f} ms per call"
        loop, ran = (
            _share(part, self._waits) for part in (self._waits.loop_busy_seconds, self._waits.loop_ran_seconds)
        )
        if loop >= LOOP_SHARE and ran >= LOOP_RAN_SHARE:
            return self._of_loop(share, loop)
        share += f", on {self._cores} cores"
        if 0 < threads < self._cores:
            gain = self._gain(seconds, self._cores / threads)
            return Diagnosis(binds=binds, evidence=share, setting={"decode_threads": self._cores}, gain=gain)
        return Diagnosis(binds=binds, evidence=share, advice=self._words.less_decoding)

    def _of_transform(self, seconds: float, share: str) -> Diagnosis:
        config, binds = self._config, Cause.TRANSFORM.key
        busy = self._waits.transform_ran_seconds / max(self._wall_seconds, 1e-9)
        share += f", which kept {busy * max(1, self._waits.consumers):.1f} of {self._cores} cores busy"
        threads = 0 if self._seen is None else self._seen.decode.threads
        if self._waits.transform_worked_seconds < WAITING_CORES * self._wall_seconds and threads:
            decoding = self._seconds.get(Cause.DECODING, 0.0)  # in the same threads
            return Diagnosis(
                binds=binds,
                evidence=share,
                setting={"decode_threads": 2 * threads},
                gain=self._gain(seconds + decoding, 2),
                advice="it waits for something itself, such as a lock, a disk or a host, in each of these threads",
            )
        shared = (config.decode_threads, config.decoder_cache_size, config.fetch.max_requests_per_host)
        workers = min(8, self._cores, *(most for most in shared if most is not None))  # each needs one of them
        if self._workers or workers < 2 or busy > PARALLEL_CORES:
            are_idle = busy <= PARALLEL_CORES and max(1, self._workers) < self._cores
            more = "use more loader workers (num_workers)" if are_idle else "use more cores"
            return Diagnosis(binds=binds, evidence=share, advice=f"make it faster, or {more}")
        return Diagnosis(
            binds=binds,
            evidence=share,
            setting={"num_workers": workers},
            gain=self._gain(seconds, workers),
            advice="Python runs one thread at a time; each loader worker has its own interpreter",
        )
