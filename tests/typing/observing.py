"""Watching a run as a user writes it: checked by mypy and pyright, never run."""

from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any, Literal, assert_type

import aiorpc_torch as aiorpc
from aiorpc_torch import observe
from aiorpc_torch.observe import (
    CallInfo,
    Interceptor,
    MetricsServer,
    Tracing,
    intercept,
    propagate,
    serve_metrics,
)

REQUEST: ContextVar[str] = ContextVar("request")


class Audit(Interceptor):
    """It may return the function for the end, and need not override all methods."""

    def on_call(self, call: CallInfo) -> Callable[[BaseException | None], None]:
        def end(failure: BaseException | None) -> None:
            print(call.method, failure)

        return end

    def on_receive(self, call: CallInfo) -> None:
        print(call.peer)


class Batches(Interceptor):
    def on_batch(self, batch: CallInfo, callers: Sequence[Context]) -> None:
        for each in callers:
            each.run(REQUEST.get)


class Wrong(Interceptor):
    def on_call(self, call: str) -> None: ...  # type: ignore[override]  # pyright: ignore


def variables() -> None:
    propagate(REQUEST)
    propagate("request")  # type: ignore[arg-type]  # pyright: ignore


def interceptors(call: CallInfo) -> None:
    """`intercept` takes an instance, and returns what ends it."""
    assert_type(intercept(Audit()), Callable[[], None])
    assert_type(intercept(Tracing()), Callable[[], None])
    intercept(Audit)  # type: ignore[arg-type]  # pyright: ignore
    intercept(print)  # type: ignore[arg-type]  # pyright: ignore
    assert_type(call.kind, Literal["call", "stream", "group", "map", "batch"])
    assert_type((call.method, call.worker, call.peer), tuple[str, str, str])
    assert_type((call.began, call.size), tuple[float, int])
    call.method = ""  # type: ignore[misc]  # pyright: ignore


def metrics(provider: Any) -> None:
    server = serve_metrics(port=9464, host="0.0.0.0")
    assert_type(server, MetricsServer)
    assert_type((server.url, server.port), tuple[str, int])
    server.close()
    with observe.serve_metrics() as entered:
        assert_type(entered, MetricsServer)
    assert_type(serve_metrics(tls=aiorpc.Tls("cert", "key", "ca")), MetricsServer)
    serve_metrics("9464")  # type: ignore[arg-type]  # pyright: ignore
    Tracing(provider)


async def counters() -> None:
    """Counters and calls, here and on another worker."""
    assert_type(aiorpc.observe.stats(), aiorpc.observe.Stats)
    assert_type(aiorpc.observe.stats().batches, dict[str, aiorpc.observe.BatchStats])
    assert_type(aiorpc.observe.pending(), list[aiorpc.observe.PendingCall])
    assert_type(await aiorpc.call("w", aiorpc.observe.stats), aiorpc.observe.Stats)
    async with aiorpc.local_world(["w"], logs="names") as me:
        async for change in me.changes():
            assert_type(change.kind, Literal["joined", "left", "lost", "returned"])
            assert_type((change.name, change.rank, change.reason), tuple[str, int, str])
    aiorpc.local_world(["w"], logs="name")  # type: ignore[arg-type]  # pyright: ignore
