"""Private names of torch that this library uses, imported here and nowhere else.

A torch without one of them fails at import with a sentence that names the versions that work.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .._version import __version__

SUPPORTED = "2.11 to 2.15"

try:
    # A future of torch's RPC: the base of torch.futures.Future, and quicker to make.
    from torch._C import Future as RawFuture
    from torch._C import _dispatch_keys as dispatch_keys
    from torch._C._distributed_autograd import (
        _current_context as current_context,
    )
    from torch._C._distributed_autograd import (
        _get_debug_info as autograd_debug_info,
    )
    from torch._C._distributed_autograd import (
        _new_context as new_context,
    )
    from torch._C._distributed_autograd import (
        _release_context as release_context,
    )
    from torch._C._distributed_autograd import (
        backward,
        get_gradients,
    )
    from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

    # RRefBase: what arrives through torch; `rpc.RRef` is its subclass.
    from torch._C._distributed_rpc import PyRRef as RRefBase
    from torch._C._distributed_rpc import (
        TensorPipeAgent,
        WorkerInfo,
    )
    from torch._C._distributed_rpc import (
        _delete_all_user_and_unforked_owner_rrefs as delete_rrefs,
    )
    from torch._C._distributed_rpc import (
        _invoke_rpc_python_udf as invoke_rpc,
    )
    from torch._C._distributed_rpc import (
        _is_current_rpc_agent_set as has_agent,
    )
    from torch.distributed import autograd as _autograd
    from torch.distributed.rpc import api as _api
    from torch.distributed.rpc.internal import PythonUDF, RemoteException, serialize
    from torch.utils._pytree import tree_leaves

    init_rpc_states: Callable[[Any], None] = _api._init_rpc_states
    init_autograd: Callable[[int], None] = _autograd._init  # type: ignore[attr-defined]
except (ImportError, AttributeError) as exc:
    raise ImportError(
        f"aiorpc_torch {__version__} supports torch {SUPPORTED}, built with torch.distributed.rpc; "
        f"found {torch.__version__}: {exc}"
    ) from exc

__all__ = (
    "FileStore",
    "HashStore",
    "PythonUDF",
    "RRefBase",
    "RawFuture",
    "RemoteException",
    "Store",
    "TCPStore",
    "TensorPipeAgent",
    "WorkerInfo",
    "autograd_debug_info",
    "backward",
    "current_context",
    "delete_rrefs",
    "dispatch_keys",
    "get_gradients",
    "has_agent",
    "init_autograd",
    "init_rpc_states",
    "invoke_rpc",
    "new_context",
    "release_context",
    "serialize",
    "tree_leaves",
)


# ── the autograd context of a thread ────────────────────────────────────────────────────────────

_CONTAINER = "_ZN5torch11distributed8autograd21DistAutogradContainer"
_LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")


def find_context_functions(
    library: str = _LIBRARY,
) -> tuple[Callable[[], int], Callable[[int], None] | None]:
    """Return how to get and to set the autograd context of this thread, None if it cannot be set.

    torch's Python interface sets none, and asks by an exception, which takes 20 µs.
    """
    try:
        loaded = ctypes.PyDLL(library)
        get = loaded[f"{_CONTAINER}16currentContextIdEv"]
        put = loaded[f"{_CONTAINER}21forceCurrentContextIdEl"]
    except (OSError, AttributeError) as exc:
        warnings.warn(
            f"torch {torch.__version__} does not export its autograd contexts ({exc}): calls in a "
            f"context will raise; supported are {SUPPORTED}",
            RuntimeWarning,
            stacklevel=2,
        )
        return _context_by_exception, None
    get.restype, get.argtypes = ctypes.c_int64, []
    put.restype, put.argtypes = None, [ctypes.c_int64]
    return get, put


def _context_by_exception() -> int:
    try:
        return int(current_context()._context_id())
    except RuntimeError:
        return -1


autograd_context, force_context = find_context_functions()
"""The id of the distributed autograd context that is open in this thread, -1 if none is."""
