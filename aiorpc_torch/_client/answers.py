"""What answers calls beside frames of results: answers of torch's, and last frames."""

import logging
from typing import Any

from .._protocol.exceptions import Failure
from .._protocol.messages import load_results
from .._protocol.payloads import detach
from .._protocol.recording import plain_answer
from .._protocol.tensors import INLINE_BYTES
from .._torch.transport import transport_error
from ..errors import NotServing, RemoteError, RemoteTraceback, RpcError, WorkerLost

log = logging.getLogger("aiorpc_torch")


def read_answer(answer: Any, peer: str, *, recorded: bool = False) -> list[Any] | RpcError:
    """Return the results in an answer of torch's, which is there, or what came of it."""
    try:
        results = answer.wait()
        if isinstance(results, Failure):  # nobody serves there, or it was not taken in
            results.get()
    except RpcError as exc:
        return exc
    except BaseException as exc:  # of whatever class the peer names: SystemExit is not ours
        return transport_error(exc, peer)
    try:
        if recorded:
            results = plain_answer(results)
        parts = (results, ()) if isinstance(results, bytes) else results
        return load_results(*detach(*parts))
    except BaseException as exc:
        log.warning("an answer of worker %r cannot be read: %r", peer, exc)
        return RemoteError(f"the answer of worker {peer!r} cannot be read: {exc!r}")


def is_inline(results: Any) -> bool:
    """Return whether the results in an answer of torch's would have gone on the connection."""
    return isinstance(results, bytes) or (not results[1] and len(results[0]) <= INLINE_BYTES)


def error_of(peer: str, what: str, text: str) -> RpcError:
    """Return what the peer's last frame means for calls that it has not answered."""
    if what == "failed":
        summary, _, rest = text.partition("\n")
        error = WorkerLost(peer, summary)
        error.__cause__ = RemoteTraceback(peer, rest) if rest else None
        return error
    if what == "broken":
        return RemoteError(f"worker {peer!r} has closed the connection: {text}")
    return NotServing(text or f"worker {peer!r} has stopped")
