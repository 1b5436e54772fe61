"""What watches a world of the search: traces, metrics and an interceptor, which may all fail."""

import contextlib
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from aiorpc_torch import observe
from aiorpc_torch.observe import CallInfo, Interceptor, intercept
from tests.support.hooks import no_hooks

SCRAPE_TIMEOUT = 10.0  # real seconds


class Watch(Interceptor, SpanProcessor, SpanExporter):
    """An interceptor, a processor of spans and an exporter in one, around a world.

    Attributes:
        before_watch: is called in each of their methods.
    """

    def __init__(self) -> None:
        self.before_watch: Callable[[], object] = _nothing
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Trace, count and note all calls in the block."""
        self._open.clear()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self))
        provider.add_span_processor(self)
        # In a thread, where no event loop runs whose lag would be measured.
        with no_hooks(), ThreadPoolExecutor(1) as pool:
            intercept(self)
            intercept(observe.Tracing(provider))
            with pool.submit(observe.serve_metrics).result() as server:
                _urls.append(server.url)
                yield
                _urls.remove(server.url)

    def unended(self) -> Counter[str]:
        """Return the spans, and the calls of the interceptor, that have not ended."""
        return +self._open

    # ── what is told ────────────────────────────────────────────────────────────────────────────

    def on_call(self, call: CallInfo) -> Callable[[BaseException | None], None]:
        return self._begin()

    def on_receive(self, call: CallInfo) -> Callable[[BaseException | None], None]:
        return self._begin()

    def on_batch(
        self, batch: CallInfo, callers: Sequence[Context]
    ) -> Callable[[BaseException | None], None]:
        return self._begin()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.before_watch()
        self._open["spans"] += 1

    def on_end(self, span: Any) -> None:
        self._open["spans"] -= 1
        self.before_watch()

    def export(self, spans: Any) -> SpanExportResult:
        self.before_watch()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _begin(self) -> Callable[[BaseException | None], None]:
        self.before_watch()
        self._open["calls of the interceptor"] += 1
        return self._end

    def _end(self, _: BaseException | None) -> None:
        self._open["calls of the interceptor"] -= 1
        self.before_watch()


_urls: list[str] = []  # of the metrics of watched worlds


def scrape() -> None:
    """Read the metrics of the watched world, on its loop: they come from a thread."""
    for url in _urls:
        with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT) as answer:
            assert b"aiorpc_client_calls_total" in answer.read()


def _nothing() -> None:
    pass
