"""asyncio for `torch.distributed.rpc`: a remote call is an `await`.

    testing     worlds, gates and leak checks for the tests of users
    _stats      counters of this process
    _world      rendezvous, startup, failure detection, rejoin, shutdown, child processes
    autograd    contexts and optimizers of distributed autograd
    _batching   @batched: policies, scheduler, queue, collation, results
    _client     calls out: connection pool, connections, pending calls, streams in
    _server     calls in: sessions, dispatch, executor, streams out
    _protocol   what travels: codecs, frames, flow control, entry points for torch RPC
    _torch      the adapter to torch.distributed.rpc and to private interfaces
    _aio        primitives of asyncio and threads, without torch
    errors      exceptions that callers catch

Imports go down this list only. `_batching`, `_client` and `_server` do not import each other.
"""

from torch.distributed.rpc import RRef as RRef

from . import autograd as autograd
from ._aio.deadlines import timeout as timeout
from ._batching.decorator import batched as batched
from ._batching.policies import Fill as Fill, Round as Round
from ._batching.results import Broadcast as Broadcast
from ._batching.stats import BatchStats as BatchStats
from ._client.api import call as call, create as create, fetch as fetch, remote as remote
from ._server.torch_clients import async_execution as async_execution
from ._stats import Stats as Stats, stats as stats
from ._torch.transport import wrap_future as wrap_future
from ._version import __version__ as __version__
from ._world.attach import (
    AttachedThread as AttachedThread,
    attach as attach,
    attach_in_thread as attach_in_thread,
)
from ._world.local import local_world as local_world, run_local as run_local
from ._world.worker import Worker as Worker, worker as worker
from .errors import (
    BatchContractError as BatchContractError,
    CallTimeout as CallTimeout,
    NotExported as NotExported,
    NotServing as NotServing,
    QueueFull as QueueFull,
    RemoteError as RemoteError,
    RemoteTraceback as RemoteTraceback,
    RoundTimeout as RoundTimeout,
    RpcError as RpcError,
    WorkerLost as WorkerLost,
    WorldTimeout as WorldTimeout,
)

__all__ = (
    "AttachedThread",
    "BatchContractError",
    "BatchStats",
    "Broadcast",
    "CallTimeout",
    "Fill",
    "NotExported",
    "NotServing",
    "QueueFull",
    "RRef",
    "RemoteError",
    "RemoteTraceback",
    "Round",
    "RoundTimeout",
    "RpcError",
    "Stats",
    "Worker",
    "WorkerLost",
    "WorldTimeout",
    "async_execution",
    "attach",
    "attach_in_thread",
    "autograd",
    "batched",
    "call",
    "create",
    "fetch",
    "local_world",
    "remote",
    "run_local",
    "stats",
    "timeout",
    "worker",
    "wrap_future",
)
