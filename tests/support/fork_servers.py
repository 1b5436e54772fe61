"""The process that forks the children of local worlds, as tests look at it."""

import psutil
from torch.distributed import rpc

from aiorpc_torch._children import forkserver


def server() -> psutil.Process:
    """Return the process that forks the children of this one."""
    pid = forkserver.server_pid()
    assert pid is not None
    return psutil.Process(pid)


def inherited(*names: str) -> dict[str, object]:
    """Return what this process has from the one that started it, by these names."""
    found = forkserver.inherited_state()
    return {name: found[name] for name in names}


def torch_runs() -> bool:
    """Return whether torch's RPC runs in this process."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True
