"""asyncio for `torch.distributed.rpc`: a remote call is an `await`.

The map of the house, from the ground up; imports point down only.

    errors                            what can go wrong, and what to do about it
    _batcher                          when waiting requests become a batch (pure)
    _lane, _desk                      order of arrival; which message takes which result back (pure)
    _exceptions, _deadline, _handles  how exceptions, deadlines and RRefs cross
    _inbox, _threads                  from any thread into a loop; threads for plain `def`s
    _bridge, _wire                    torch's futures awaited; what travels
    _jobs, _runner, _server, _doors   the callee: from a message to the loop or a thread, and back
    _link, _outbox, _remote           the caller: what the user types, and the message it becomes
    _answers, _queue, _batched        `@batched`
    _rendezvous, _leaving, _world     a worker's life: it joins, serves and leaves
    _child, _local                    worlds on this machine
"""

from torch.distributed.rpc import RRef as RRef

from ._answers import Broadcast as Broadcast
from ._batched import batched as batched
from ._batcher import Fill as Fill
from ._batcher import Round as Round
from ._bridge import wrap_future as wrap_future
from ._deadline import timeout as timeout
from ._doors import async_execution as async_execution
from ._local import local_world as local_world
from ._local import run_local as run_local
from ._remote import call as call
from ._remote import create as create
from ._remote import fetch as fetch
from ._remote import remote as remote
from ._world import Worker as Worker
from ._world import worker as worker
from .errors import BatchContractError as BatchContractError
from .errors import CallTimeout as CallTimeout
from .errors import NotServing as NotServing
from .errors import RemoteError as RemoteError
from .errors import RemoteTraceback as RemoteTraceback
from .errors import RpcError as RpcError
from .errors import WorkerLost as WorkerLost
from .errors import WorldTimeout as WorldTimeout

__version__ = "0.1.0"

__all__ = (
    "BatchContractError",
    "Broadcast",
    "CallTimeout",
    "Fill",
    "NotServing",
    "RRef",
    "RemoteError",
    "RemoteTraceback",
    "Round",
    "RpcError",
    "Worker",
    "WorkerLost",
    "WorldTimeout",
    "async_execution",
    "batched",
    "call",
    "create",
    "fetch",
    "local_world",
    "remote",
    "run_local",
    "timeout",
    "worker",
    "wrap_future",
)
