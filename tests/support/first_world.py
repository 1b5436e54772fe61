"""The first world of a process, whose agent torch asks for names in later ones too."""

from aiorpc_torch import testing
from aiorpc_torch._torch.agent import process_worker_id


async def enter_main_first() -> None:
    """Let the first world of this process have the usual name, for `rref.rpc_sync()` in later ones.

    For tests whose worlds have others: a file is run in a process that runs further ones.
    """
    if process_worker_id() is None:
        async with testing.world():
            pass
