"""`serve_metrics`: the metrics of this process over HTTP, from a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from . import intercept
from .loop_lag import LoopLag
from .metrics import Metrics
from .recorder import Recorder

CLIENT_TIMEOUT = 5.0  # seconds for which a client may be silent; it holds a thread


def serve_metrics(port: int = 0, host: str = "127.0.0.1") -> "MetricsServer":
    """Serve the metrics of this process to Prometheus, in the OpenMetrics format.

    Calls are counted from now on, those of earlier worlds of this process too. The answers come
    from a thread, so a blocked event loop is scraped too. Needs the extra `prometheus`. Close it
    with `close()` or as a context manager:

        with observe.serve_metrics() as metrics:
            print(metrics.url)

    Call it on the event loop whose lag is to be measured. Methods beyond the first 200 and peers
    beyond the first 100 are counted as `other`.

    Args:
        port: TCP port (default: 0, a free one).
        host: Address to listen at (default: this machine only). Anyone who reaches it can read the
            metrics.

    Raises:
        ImportError: without `prometheus_client`.
        OSError: if the port is taken; the text names it.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as exc:
        raise ImportError(
            "serve_metrics needs prometheus_client: pip install 'aiorpc_torch[prometheus]'"
        ) from exc
    recorder, lag = Recorder(), _loop_lag()
    registry = CollectorRegistry()
    registry.register(Metrics(recorder, lag))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        text = f"metrics cannot be served at port {port} of {host}: {exc.strerror or exc}"
        raise OSError(exc.errno, text) from exc
    server.RequestHandlerClass = _bounded(server.RequestHandlerClass)
    if lag is not None:
        lag.start()
    return MetricsServer(server, thread, lag, intercept(recorder))


class MetricsServer:
    """The HTTP server of `serve_metrics`, until it is closed.

    Attributes:
        port: TCP port.
        url: Address for a scrape.
    """

    def __init__(
        self,
        server: Any,
        thread: threading.Thread,
        lag: LoopLag | None,
        stop_counting: Callable[[], None],
    ) -> None:
        self.port: int = server.server_port
        self.url = f"http://{server.server_address[0]}:{self.port}/metrics"
        self._server = server
        self._thread = thread
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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._lag is not None:
            self._lag.close()


def _bounded(handler: Any) -> Any:
    """Return a class of handlers that end the connection of a silent client."""

    class Bounded(handler):  # type: ignore[misc]
        timeout = CLIENT_TIMEOUT

        def handle(self) -> None:
            with contextlib.suppress(TimeoutError):
                super().handle()

    return Bounded


def _loop_lag() -> LoopLag | None:
    try:
        return LoopLag(asyncio.get_running_loop())
    except RuntimeError:
        return None
