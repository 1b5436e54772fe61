"""Pickles of torch's RemoteModule. Imported by its users only: torch makes a module on the disk."""

from typing import Any

from torch.distributed.nn.api.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, RemoteModule
from torch.nn import Module


def parts(module: Any) -> dict[str, Any]:
    """Return the attributes that a copy of a RemoteModule needs, with the RRef of its module."""
    return {name: vars(module)[name] for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES}


def read(attributes: dict[str, Any]) -> Any:
    """Return the copy. Unlike torch's, it can be called, as the original can."""
    module: Any = object.__new__(RemoteModule)
    Module.__init__(module)
    vars(module).update(attributes)
    module._install_generated_methods()
    return module
