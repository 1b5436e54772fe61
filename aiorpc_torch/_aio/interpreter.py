"""The requirements on the interpreter: private names of CPython, and the GIL.

The private names stand where they are used, with the reason; here they are checked together, when
the package is imported. (tests/unit/aio/test_interpreter.py)
"""

import asyncio
import atexit
import contextlib
import copyreg
import ctypes
import operator
import os
import sys
import threading
import weakref
from multiprocessing import context, forkserver, popen_fork, process, resource_tracker, spawn, util
from typing import Any

from .._version import __version__

SUPPORTED = "3.11 to 3.14"
SWITCH = "AIORPC_TORCH_FREE_THREADED"

PRIVATE_NAMES: tuple[tuple[Any, str], ...] = (
    (asyncio, "_get_running_loop"),
    (asyncio.Future, "_asyncio_future_blocking"),
    (asyncio.Task, "_log_destroy_pending"),
    *([(asyncio.tasks, "_current_tasks")] if sys.version_info < (3, 12) else ()),
    (asyncio.tasks, "_unregister_task"),
    (atexit, "_run_exitfuncs"),
    (contextlib, "_AsyncGeneratorContextManager"),
    (contextlib, "_GeneratorContextManager"),
    (sys, "_current_frames"),
    (sys, "_getframe"),
    (threading, "_shutdown"),
    (copyreg, "_slotnames"),
    (weakref, "finalize._registry"),
    (context, "SpawnProcess._start_method"),
    (forkserver, "_forkserver._forkserver_pid"),
    (process, "BaseProcess._Popen"),
    (resource_tracker, "_resource_tracker._fd"),
    (resource_tracker, "_resource_tracker._pid"),
    (spawn, "_main"),
    (util, "_args_from_interpreter_flags"),
    (popen_fork, "Popen._launch"),
    (popen_fork, "Popen._send_signal"),
    (ctypes.pythonapi, "PyGILState_Ensure"),
    (ctypes.pythonapi, "PyThreadState_Clear"),
    (ctypes.pythonapi, "PyThreadState_Delete"),
    (ctypes.pythonapi, "PyThreadState_Get"),
)


def check_interpreter() -> None:
    """Raise ImportError if this interpreter cannot run the package.

    Torch's threads, those of plain methods and the event loop share state without locks: deques,
    dictionaries and flags that are safe to share only with the GIL.
    """
    missing: list[str] = []
    for owner, name in PRIVATE_NAMES:
        try:
            operator.attrgetter(name)(owner)
        except AttributeError:
            missing.append(name)
    if missing:
        raise ImportError(
            f"aiorpc_torch {__version__} supports CPython {SUPPORTED}; "
            f"found {sys.version.split()[0]} without {', '.join(missing)}"
        )
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if not has_gil and os.environ.get(SWITCH) != "1":
        raise ImportError(
            f"aiorpc_torch {__version__} is not safe without the GIL, which this free-threaded "
            f"Python has disabled. Set PYTHON_GIL=1, or {SWITCH}=1 to run it at your own risk"
        )


check_interpreter()
