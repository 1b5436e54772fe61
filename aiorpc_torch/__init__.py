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
from ._batching.policies import Fill as Fill
from ._batching.policies import Round as Round
from ._batching.results import Broadcast as Broadcast
from ._batching.stats import BatchStats as BatchStats
from ._client.api import call as call
from ._client.api import create as create
from ._client.api import fetch as fetch
from ._client.api import remote as remote
from ._server.torch_clients import async_execution as async_execution
from ._stats import Stats as Stats
from ._stats import stats as stats
from ._torch.transport import wrap_future as wrap_future
from ._version import __version__ as __version__
from ._world.local import local_world as local_world
from ._world.local import run_local as run_local
from ._world.worker import Worker as Worker
from ._world.worker import worker as worker
from .errors import BatchContractError as BatchContractError
from .errors import CallTimeout as CallTimeout
from .errors import NotExported as NotExported
from .errors import NotServing as NotServing
from .errors import QueueFull as QueueFull
from .errors import RemoteError as RemoteError
from .errors import RemoteTraceback as RemoteTraceback
from .errors import RoundTimeout as RoundTimeout
from .errors import RpcError as RpcError
from .errors import WorkerLost as WorkerLost
from .errors import WorldTimeout as WorldTimeout

__all__ = (
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
