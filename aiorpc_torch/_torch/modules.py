"""Modules that only torch's own pickles of RPC can hold: script modules and RemoteModules.

torch's public functions save and load script modules with a warning at each use. (2.14)
"""

import importlib
import sys
from typing import Any

import torch

from .compat import CompilationUnit, load_script, wrap_script

_REMOTE = "torch.distributed.nn.api.remote_module"  # imported by those who use it only


def reduce_module(module: Any) -> Any:
    """Return the reduction of a script module or a RemoteModule; NotImplemented for any other.

    Raises:
        TypeError: for a script module that holds a RemoteModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        if hasattr(module._c, "module_rref"):
            raise TypeError(
                "a script module with a RemoteModule cannot be sent: send its module_rref, and "
                "call RemoteModule.init_from_module_rref at the receiver"
            )
        return reduce_script(module)
    loaded = sys.modules.get(_REMOTE)
    if loaded is None or not isinstance(module, loaded._RemoteModule):
        return NotImplemented
    # The receiver imports torch's module before the generated functions, which are in it.
    remote_modules = importlib.import_module(".remote_modules", __package__)
    return remote_modules.read, (remote_modules.parts(module),)


def reduce_script(script: Any) -> Any:
    """Return the reduction of a script module or function, with its code."""
    return read_script, (script.save_to_buffer(),)


def read_script(data: bytes) -> Any:
    """Return the script module that was pickled; for a function, one that is called as that."""
    found: Any = load_script(CompilationUnit(), data, None, {}, False)
    return wrap_script(found)


def python_function(function: Any) -> Any:
    """Return the function from which torch made a script function; any other as it is."""
    return getattr(function, "_torchdynamo_inline", function)
