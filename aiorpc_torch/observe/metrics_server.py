"""`serve_metrics`: the metrics of this process over HTTP, from a thread of its own."""

import asyncio
import errno
from collections.abc import Callable
from urllib.parse import urlsplit

from .. import Tls
from .._port.http_port import HttpPort, listen
from .._port.tunnels import format_endpoint
from . import intercept
from .metrics import LagThread, Metrics
from .recorder import Recorder


def serve_metrics(
    port: int = 0, host: str = "127.0.0.1", *, tls: Tls | None = None
) -> "MetricsServer":
    """Serve the metrics of this process to Prometheus, in the OpenMetrics format.

    Calls are counted from now on, those of earlier worlds of this process too. The answers come
    from a thread, so a blocked event loop is scraped too. Needs the extra `prometheus`. Close it
    with `close()` or as a context manager:

        with observe.serve_metrics() as metrics:
            print(metrics.url)

    Call it on the event loop whose lag is to be measured. Methods beyond the first 200 and peers
    beyond the first 100 are counted as `other`. A request has 10 s in all, and there are at most 64
    connections: if more come, the oldest of the host that has the most is closed.

    Args:
        port: TCP port (default: 0, a free one).
        host: Address to listen at (default: this machine only). Without `tls`, anyone who reaches
            it can read the metrics, in clear text.
        tls: Certificate for https. Prometheus needs one of the same authority (default: None, clear
            text, whatever `tls=` the world has).

    Raises:
        ImportError: without `prometheus_client`.
        OSError: if the port is taken; the text names it.
        ValueError: if the port is none, or the certificate is not valid with its authority.
        TypeError: if an argument is of another type.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
    except ImportError as exc:
        raise ImportError(
            "serve_metrics needs prometheus_client: pip install 'aiorpc_torch[prometheus]'"
        ) from exc
    if not isinstance(port, int):
        raise TypeError(f"port must be an int, got {port!r}")
    if not 0 <= port < 65536:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    if tls is not None:
        if not isinstance(tls, Tls):
            raise TypeError(f"tls must be a Tls, got {tls!r}")
        tls.check()
    recorder, loop = Recorder(), asyncio._get_running_loop()
    lag = None if loop is None else LagThread(loop)
    registry = CollectorRegistry()
    registry.register(Metrics(recorder, lag))
    ProcessCollector(registry=registry)  # CPU, memory and descriptors of this process
    try:
        listening = listen(host, port)
    except OSError as exc:
        text = f"metrics cannot be served at port {port} of {host}: {exc.strerror or exc}"
        if exc.errno == errno.EADDRINUSE:
            text += ". Each process of a machine needs its own port; with port=0 it gets a free one"
        raise OSError(exc.errno, text) from exc
    address = format_endpoint(*listening.getsockname()[:2])
    server = HttpPort(listening, make_wsgi_app(registry), "aiorpc-metrics", tls)
    if lag is not None:
        lag.start()
    url = f"{'http' if tls is None else 'https'}://{address}/metrics"
    return MetricsServer(server, url, lag, intercept(recorder))


class MetricsServer:
    """The HTTP server of `serve_metrics`, until it is closed.

    Attributes:
        port: TCP port.
        url: Address for a scrape.
    """

    def __init__(
        self, server: HttpPort, url: str, lag: LagThread | None, stop_counting: Callable[[], None]
    ) -> None:
        self.url = url
        self.port: int = urlsplit(url).port or 0
        self._server = server
        self._lag = lag
        self._stop_counting = stop_counting
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MetricsServer {self.url}{', closed' if self._is_closed else ''}>"

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop to count and to serve; wait for the threads, up to half a second."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_counting()
        self._server.close()
        if self._lag is not None:
            self._lag.close()
