"""Modules that only torch's own pickles of RPC can hold: script modules and RemoteModules.

torch's public functions save and load script modules with a warning at each use. (2.14)
"""

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
    # What a copy needs, with the RRef of its module. The class comes first: its import makes the
    # module on the disk that has the generated functions.
    parts = {name: vars(module)[name] for name in loaded._REMOTE_MODULE_PICKLED_ATTRIBUTES}
    return read_remote, (loaded.RemoteModule, parts)


def read_remote(cls: Any, parts: dict[str, Any]) -> Any:
    """Return the copy of a RemoteModule. Unlike torch's, it can be called, as the original can."""
    module = object.__new__(cls)
    torch.nn.Module.__init__(module)
    vars(module).update(parts)
    module._install_generated_methods()
    return module


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
