"""Statistics for Prometheus, by the registry and the web server of prometheus_client.

Tables list the metrics: name, figure of the statistics, meaning. Names follow Prometheus' conventions: base units,
``_total`` for counters. Quantiles are summaries of all time, as in the statistics; for recent means, divide the rates
of ``_sum`` and ``_count``.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, cast

from asyncfetch.errors import MissingDependency, install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector as _Registered

    from asyncfetch.fetch import FetchStatistics
    from asyncfetch.formats import DatasetStatistics
    from asyncfetch.observe.figures import Quantiles
    from asyncfetch.observe.report import Report
    from asyncfetch.stream import PassStatistics
else:
    _Registered = object  # a registry asks for nothing but ``collect``

__all__ = ["Collector"]


@dataclass(frozen=True, slots=True)
class _Metric:
    """A metric and the figure that it shows."""

    kind: Literal["counter", "gauge", "summary"]
    name: str
    figure: str
    """The figure's place in the statistics, as for attrgetter."""
    meaning: str


BY_HOST = (
    _Metric("counter", "requests_total", "requests", "Requests sent, repeats and redirects included."),
    _Metric("counter", "received_bytes_total", "bytes", "Bytes of bodies, as received."),
    _Metric("counter", "retries_total", "retries", "Attempts after the first."),
    _Metric("counter", "redirects_total", "redirects", "Answers that named another url."),
    _Metric("counter", "errors_total", "errors", "Attempts that failed, repeated or not."),
    _Metric("counter", "throttled_total", "throttled", "Attempts that were answered 429 or 503."),
    _Metric("counter", "outages_total", "outages", "Times that it was away, and waited for."),
    _Metric("counter", "hedges_total", "hedges", "Second requests for what a late answer was to bring."),
    _Metric("counter", "hedge_wins_total", "hedge_wins", "Second requests whose answer came first."),
    _Metric("gauge", "retry_budget", "retry_budget", "Repeats that may be made before the next answer comes."),
    _Metric("gauge", "max_requests_in_flight", "limit", "Requests that may be in flight now."),
    _Metric("gauge", "requests_in_flight", "in_flight", "Requests between their start and the end of their body."),
    _Metric("gauge", "requests_waiting", "waiting", "Requests that wait for their turn."),
    _Metric("summary", "wait_seconds", "wait", "Time that requests waited for their turn."),
    _Metric("summary", "first_byte_seconds", "first_byte", "Time from having a connection to the answer's head."),
    _Metric("summary", "body_seconds", "body", "Time from the answer's head to the body's last byte."),
)
"""Figures of HostStatistics, labelled by host. One idle for long may vanish, and comes back at zero."""

OF_FETCHER = (
    _Metric("counter", "reused_buffers_total", "reused_buffers", "Bodies that landed in memory of earlier ones."),
    _Metric("gauge", "idle_buffer_bytes", "idle_buffer_bytes", "Memory kept for the next bodies."),
)
"""Figures of FetchStatistics."""

OF_DATASET = (
    _Metric("counter", "clip_cache_hits_total", "clips.hits", "Asks for clips answered from memory."),
    _Metric("counter", "clip_cache_misses_total", "clips.misses", "Asks for clips that began a fetch."),
    _Metric("counter", "clip_cache_evictions_total", "clips.evictions", "Clips that made room for others."),
    _Metric("gauge", "clip_cache_used_bytes", "clips.used_bytes", "Clips in memory."),
    _Metric("gauge", "clip_cache_max_bytes", "clips.max_bytes", "Bound on clips in memory and on their way."),
    _Metric("counter", "episode_hits_total", "episodes.hits", "Reads that found all of the episode in memory."),
    _Metric("counter", "episode_misses_total", "episodes.misses", "Reads that had to wait for some of the episode."),
    _Metric("gauge", "decode_threads", "decode.threads", "Calls that decode at a time, at most."),
    _Metric("gauge", "decode_calls_running", "decode.busy", "Calls that decode now."),
    _Metric("gauge", "decode_calls_waiting", "decode.waiting", "Calls that wait for a thread."),
    _Metric("summary", "hand_over_seconds", "hand_over", "Time from the loop's thread to the consumer that waits."),
    _Metric("summary", "decode_seconds", "decode.call", "Time that a call decoded; it makes a few samples."),
)
"""Figures of DatasetStatistics, beside those of its fetcher."""

OF_DISK = (
    _Metric("counter", "disk_cache_read_bytes_total", "hit_bytes", "Bytes read back from the disk cache."),
    _Metric("counter", "disk_cache_written_bytes_total", "written_bytes", "Bytes written to the disk cache."),
    _Metric("counter", "disk_cache_skipped_total", "skipped", "Files not written for want of room."),
    _Metric("counter", "disk_cache_damaged_total", "damaged", "Files deleted because they weren't what was written."),
    _Metric("counter", "disk_cache_failures_total", "failures", "Errors of the system at reading or writing."),
)
"""Figures of DiskStatistics, for a dataset with a disk cache."""

OF_PASS = (
    _Metric("counter", "samples_total", "samples", "Samples delivered to the consumer."),
    _Metric("gauge", "open_segments", "open_segments", "Segments, or parts of them, in memory or on their way."),
    _Metric("summary", "pass_hand_over_seconds", "hand_over", "Time from decoded samples to the task that waits."),
    _Metric("summary", "consumer_wait_seconds", "wait", "Time that the consumer waited for the next few samples."),
)
"""Figures of PassStatistics."""

OF_WAITS = (
    _Metric("counter", "consumer_samples_total", "samples", "Samples delivered, in all passes, by all workers."),
    _Metric("counter", "consumer_seconds_total", "wall_seconds", "Time of the consumers, of whatever kind."),
    _Metric("counter", "consumer_busy_seconds_total", "busy_seconds", "Time that was the consumers' own."),
)
"""Figures of a Report, beside what they waited for and its statistics."""


class Collector(_Registered):
    """Shows statistics to Prometheus, under names that begin with ``asyncfetch_``, as a new snapshot at each scrape.

        prometheus_client.REGISTRY.register(Collector(fetcher.statistics))

    A registry shows each name once, so one collector of a fetcher or dataset and one of a pass fit into it; give
    others a registry of their own. Hosts are named ``scheme://host:port``, without login, path and signature.

    Args:
        statistics: Returns the snapshot to show: ``statistics`` of a Fetcher, dataset, stream or pass, or ``report`` of
            one except a Fetcher. A report has the statistics and, for all passes, the consumers' waits by cause; a wait
            has a cause once it has ended. It is called in the thread that scrapes. None shows nothing. Its errors fail
            the scrape.

    Raises:
        MissingDependency: prometheus_client isn't installed.
    """

    def __init__(
        self, statistics: Callable[[], FetchStatistics | DatasetStatistics | PassStatistics | Report | None]
    ) -> None:
        self._statistics = statistics
        try:
            import prometheus_client.core
        except ImportError as error:
            message = f"metrics for Prometheus need prometheus_client: {install_command('metrics')}"
            raise MissingDependency(message) from error
        self._core = prometheus_client.core

    def collect(self) -> Iterator[Metric]:
        """The metrics of one snapshot. Called by the registry."""
        now = self._statistics()
        if now is None:
            return
        if hasattr(now, "hosts"):  # not isinstance: their classes are in rooms above
            yield from self._of_fetcher(cast("FetchStatistics", now))
        elif hasattr(now, "verdict"):
            yield from self._of_report(cast("Report", now))
        elif hasattr(now, "fetch"):
            yield from self._of_dataset(cast("DatasetStatistics", now))
        else:
            yield from self._metrics(OF_PASS, [({}, now)])

    def _of_report(self, now: Report) -> Iterator[Metric]:
        yield from self._metrics(OF_WAITS, [({}, now.all_waits)])
        waited = self._core.Metric("asyncfetch_consumer_waited_seconds", "Time that consumers waited.", "counter")
        for cause, seconds in now.all_waits.by_cause.items():
            waited.add_sample("asyncfetch_consumer_waited_seconds_total", {"cause": cause.key}, seconds)
        yield waited
        if now.all_statistics is not None:
            yield from self._of_dataset(now.all_statistics)

    def _of_fetcher(self, now: FetchStatistics) -> Iterator[Metric]:
        yield from self._metrics(BY_HOST, [({"host": origin}, host) for origin, host in now.hosts.items()])
        yield from self._metrics(OF_FETCHER, [({}, now)])

    def _of_dataset(self, now: DatasetStatistics) -> Iterator[Metric]:
        yield from self._of_fetcher(now.fetch)
        yield from self._metrics(OF_DATASET, [({}, now)])
        if now.disk is not None:
            yield from self._metrics(OF_DISK, [({}, now.disk)])

    def _metrics(self, table: Iterable[_Metric], rows: list[tuple[dict[str, str], object]]) -> Iterator[Metric]:
        """A metric for each line of ``table``, with a sample for each of the rows, which are labels and statistics."""
        for shown in table:
            name, figure = f"asyncfetch_{shown.name}", attrgetter(shown.figure)
            metric = self._core.Metric(name.removesuffix("_total"), shown.meaning, shown.kind)
            for labels, statistics in rows:
                if shown.kind == "summary":
                    _add_summary(metric, labels, figure(statistics))
                else:
                    metric.add_sample(name, labels, figure(statistics))
            yield metric


def _add_summary(metric: Metric, labels: dict[str, str], times: Quantiles) -> None:
    if times.count:  # a quantile of nothing isn't zero
        metric.add_sample(metric.name, labels | {"quantile": "0.5"}, times.p50_seconds)
        metric.add_sample(metric.name, labels | {"quantile": "0.95"}, times.p95_seconds)
        metric.add_sample(metric.name, labels | {"quantile": "0.99"}, times.p99_seconds)
    metric.add_sample(f"{metric.name}_sum", labels, times.sum_seconds)
    metric.add_sample(f"{metric.name}_count", labels, times.count)
