"""Calls as they would be without the caller's own checks: a peer may send them."""

from typing import Any

from aiorpc_torch._client.call import RemoteCall
from aiorpc_torch._wire.targets import BoundTarget, FetchTarget, MethodTarget


def past_the_caller(rref: Any, name: Any) -> Any:
    """Call a method by a name that `remote` would refuse."""
    return RemoteCall(rref, MethodTarget(rref, name), None)


def call_bound(rref: Any, function: Any) -> Any:
    """Call what `call` would refuse as a function."""
    return RemoteCall(rref, BoundTarget(rref, function), None)


def fetched(rref: Any) -> Any:
    """Fetch a copy at the owner too, where `fetch` returns the object itself."""
    return RemoteCall(rref, FetchTarget(rref), None)
