"""Private names of torch, imported in this module only.

Without one of them the import fails with an error that names the supported versions.
"""

import contextlib
import ctypes
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._aio.fork import check_not_forked
from .._version import __version__
from ..errors import NotInWorld

SUPPORTED = "2.11 to 2.15"

try:
    from torch import _jit_internal

    # The base class of torch.futures.Future, and faster to make.
    from torch._C import (
        CompilationUnit,
        DisableTorchFunctionSubclass,
        DispatchKey,
        DispatchKeySet,
        Future as RawFuture,
        _dispatch_keys as dispatch_keys,
        import_ir_module_from_buffer,
    )
    from torch._C._autograd import _profiler_enabled as profiler_enabled
    from torch._C._distributed_autograd import (
        _current_context as current_context,
        _get_debug_info as autograd_debug_info,
        _new_context as new_context,
        _release_context as release_context,
        backward,
        get_gradients,
    )
    from torch._C._distributed_c10d import HashStore, TCPStore

    # The class of RRefs that torch unpickles; `rpc.RRef` is its subclass.
    from torch._C._distributed_rpc import (
        PyRRef as RRefBase,
        TensorPipeAgent,
        WorkerInfo,
        _delete_all_user_and_unforked_owner_rrefs as delete_rrefs,
        _invoke_rpc_builtin as invoke_builtin,
        _invoke_rpc_python_udf as invoke_rpc,
        _is_current_rpc_agent_set as has_agent,
        _set_profiler_node_id as set_profiler_node,
    )
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.autograd import profiler as _profiler
    from torch.distributed import autograd as _autograd, rpc
    from torch.distributed.rpc import RRef, api as _api, functions
    from torch.distributed.rpc.internal import (
        PythonUDF,
        RemoteException,
        _internal_rpc_pickler as _pickler,
        serialize,
    )
    from torch.jit import _state as _jit_state
    from torch.jit._recursive import wrap_cpp_module
    from torch.jit._script import ScriptMeta, _CachedForward as CachedForward
    from torch.utils._pytree import tree_leaves

    begin_record: Callable[[str, None], Any] = torch.ops.profiler._record_function_enter_new
    current_agent: Callable[[], Any] = _api._get_current_rpc_agent  # type: ignore[attr-defined]
    rpc._init_counter  # noqa: B018 - read by `init_rpc_count`
    _api._is_current_rpc_agent_set  # type: ignore[attr-defined]  # noqa: B018 - see `refuse_rpc`
    load_script: Callable[..., Any] = import_ir_module_from_buffer
    wrap_script: Callable[[Any], Any] = wrap_cpp_module
    _can_compile: Callable[[Any], bool] = _jit_internal.can_compile_class
    _script_class: Callable[[Any], Any] = _jit_state._get_script_class
    _profiler._disable_profiler  # type: ignore[attr-defined]  # noqa: B018 - wrapped below
    TensorPipeAgent._update_group_membership  # noqa: B018 - wrapped below
    init_rpc_states: Callable[[Any], None] = _api._init_rpc_states
    init_autograd: Callable[[int], None] = _autograd._init  # type: ignore[attr-defined]
except (ImportError, AttributeError) as exc:
    raise ImportError(
        f"aiorpc_torch {__version__} supports torch {SUPPORTED}, built with torch.distributed.rpc; "
        f"found {torch.__version__}: {exc}"
    ) from exc


def init_rpc_count() -> int:
    """Return how many times this process has called `init_rpc`."""
    return int(rpc._init_counter)


def refuse_rpc() -> None:
    """Let the functions of torch's RPC, and methods of RRefs that send, raise: this is a fork.

    Without a lock of torch's: another thread of the parent may have held it.
    """

    def refuse(*_: Any, **__: Any) -> None:
        check_not_forked()

    _api._is_current_rpc_agent_set = refuse  # type: ignore[attr-defined, assignment]
    RRefBase.to_here = RRefBase._get_type = refuse  # type: ignore[assignment, method-assign]


def refuse_coroutines(text: str) -> None:
    """Let torch's RPC say `text`, with the name of the function, for a coroutine as a result."""

    def refuse(coroutine: "CoroutineType[Any, Any, Any]") -> NoReturn:
        coroutine.close()  # else Python warns, too
        raise TypeError(f"{coroutine.__qualname__} {text}")

    _pickler._register_reducer(CoroutineType, refuse)  # type: ignore[no-untyped-call]


def explain_missing_attributes(refuse: "Callable[[RRefBase[Any], str], NoReturn]") -> None:
    """Let every RRef call `refuse` with the name of an attribute that it does not have."""
    RRefBase.__getattr__ = refuse  # type: ignore[attr-defined]


def watch_rpc(on_call: Callable[[], None]) -> None:
    """Let torch's `rpc_sync`, `rpc_async` and `remote` call `on_call` before they send.

    Not those of torch's optimizers, which send the number of a context.
    """
    is_set = _api._is_current_rpc_agent_set  # type: ignore[attr-defined]

    def watched() -> bool:
        frame: Any = sys._getframe(1)
        function = frame.f_locals.get("func")
        if function is not None and function.__name__ in ("rpc_sync", "rpc_async", "remote"):
            caller = str(getattr(frame.f_back, "f_globals", {}).get("__name__"))
            if not caller.startswith("torch.distributed.optim."):
                on_call()
        return bool(is_set())

    _api._is_current_rpc_agent_set = watched  # type: ignore[attr-defined]


def worker_names() -> set[str]:
    """Return the set of names that torch gathers from. `init_rpc_states` replaces it."""
    return _api._ALL_WORKER_NAMES


def on_profiler_stop(function: Callable[[], None]) -> None:
    """Call `function` before each stop of a profiler, in its thread."""
    disable = _profiler._disable_profiler  # type: ignore[attr-defined]

    def stop(*args: Any, **kwargs: Any) -> Any:
        function()
        return disable(*args, **kwargs)

    _profiler._disable_profiler = stop  # type: ignore[attr-defined]


def on_group_change(function: Callable[[Any, bool], None]) -> None:
    """Call `function(worker, is_join)` after each change of an agent's table, in its thread.

    The workers of a group without a world size send these changes to each other. torch's table must
    not be read to find them: it is not locked in such a group. (2.13, 2.15)
    """
    update = TensorPipeAgent._update_group_membership

    def update_and_tell(agent: Any, worker: Any, devices: Any, maps: Any, is_join: bool) -> None:
        update(agent, worker, devices, maps, is_join)
        function(worker, is_join)

    TensorPipeAgent._update_group_membership = update_and_tell  # type: ignore[assignment, method-assign]


# ── RRefs of any object ─────────────────────────────────────────────────────────────────────────


class _Made(threading.local):
    value: Any = object()  # the object of the RRef that this thread makes now, else no user's


_NOTHING = _Made.value
_made = _Made()


def make_rref(value: Any) -> RRef[Any]:
    """Return an RRef of `value`: of a tensor with its type, of any other object without one.

    torch's constructor infers a TorchScript type, and keeps a value of that type in place of the
    object: a copy of a list or dict, `str` for `bytes`, `int` for a dtype. It takes a script module
    only with an interface, and reads freed memory for the type of a tuple. It asks three functions
    of Python first. With the answers below it infers nothing, at once.
    (2.11, 2.13, 2.14; tests/loopback/test_any_object.py)

    Raises:
        NotInWorld: outside a world, or once this worker leaves it.
    """
    # Of a tensor: distributed autograd and torch's optimizers need the type.
    made = _NOTHING if isinstance(value, Tensor) else value
    before, _made.value = _made.value, made  # a finalizer may make one meanwhile
    try:
        rref = RRef(value)
        kept = rref.local_value()
    except RuntimeError as exc:
        if has_agent():
            raise
        text = "an RRef is of a world: enter one first, as with local_world() or worker()"
        raise NotInWorld(text) from exc
    finally:
        _made.value = before
    if kept is not value:
        raise RuntimeError(
            f"torch {torch.__version__} has converted a {type(value).__qualname__} behind an RRef; "
            f"supported versions: {SUPPORTED}"
        )
    return rref


@functools.wraps(_can_compile)
def _can_compile_class(cls: Any) -> bool:
    return _made.value is not _NOTHING or _can_compile(cls)


@functools.wraps(_script_class)
def _get_script_class(cls: Any) -> Any:
    return _script_class(cls) if _made.value is _NOTHING else None


def _is_script_module(cls: Any, obj: Any) -> bool:
    return obj is not _made.value and type.__instancecheck__(cls, obj)


_jit_internal.can_compile_class = _can_compile_class  # type: ignore[assignment]
_jit_state._get_script_class = _get_script_class
ScriptMeta.__instancecheck__ = _is_script_module  # type: ignore[method-assign]


# ── the autograd context of a thread ────────────────────────────────────────────────────────────

_CONTAINER = "_ZN5torch11distributed8autograd21DistAutogradContainer"
_LIBRARIES = os.path.join(os.path.dirname(torch.__file__), "lib")


def find_context_functions(
    library: str = os.path.join(_LIBRARIES, "libtorch_cpu.so"),
) -> tuple[Callable[[], int], Callable[[int], None] | None]:
    """Return functions that get and set the autograd context id of the calling thread.

    torch's Python interface cannot set it, and raises where there is none, which takes 20 µs. So
    two C++ symbols are called. Without them the setter is None, with a warning, and calls in a
    context raise: unrecorded, they would give wrong gradients.
    (tests/loopback/test_context_symbols.py::test_torch_without_context_symbols)
    """
    try:
        loaded = ctypes.PyDLL(library)
        get = loaded[f"{_CONTAINER}16currentContextIdEv"]
        put = loaded[f"{_CONTAINER}21forceCurrentContextIdEl"]
    except (OSError, AttributeError) as exc:
        warnings.warn(
            f"torch {torch.__version__} does not export its autograd contexts ({exc}): calls in a "
            f"context will raise. Supported versions: {SUPPORTED}",
            RuntimeWarning,
            stacklevel=2,
        )
        return _slow_context_id, None
    get.restype, get.argtypes = ctypes.c_int64, []
    put.restype, put.argtypes = None, [ctypes.c_int64]
    return get, put


def _slow_context_id() -> int:
    try:
        return int(current_context()._context_id())
    except RuntimeError:
        return -1


current_context_id, force_context = find_context_functions()
"""Return the id of this thread's distributed autograd context, -1 without one."""


# ── torch's C++ log ─────────────────────────────────────────────────────────────────────────────

# If a peer dies, or a worker leaves after an error, torch's RPC logs a warning for each broken pipe
# and for each RRef. Every process does so (2.13, 2.15). This library raises or logs each of these
# events once, in its own words; the C++ lines would bury the program's own error.

CPP_WARNING, CPP_ERROR = 1, 2


def find_cpp_log_level(library: str = os.path.join(_LIBRARIES, "libc10.so")) -> ctypes.c_int | None:
    """Return the level below which torch's C++ code does not log, None if it is not exported.

    TORCH_CPP_LOG_LEVEL sets it, which torch reads when it is imported.
    """
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # built with another logging library
        return None


cpp_log_level = find_cpp_log_level()
"""Least level that torch's C++ code logs."""


@contextlib.contextmanager
def hide_in_cpp_log(least: int) -> Iterator[None]:
    """Log nothing of the level `least` inside the block, if it is the least that is logged.

    Another one was chosen by the environment or the program, and stays.
    """
    level = cpp_log_level
    if level is None or "TORCH_CPP_LOG_LEVEL" in os.environ or level.value != least:
        yield
        return
    level.value = least + 1
    try:
        yield
    finally:
        level.value = least
