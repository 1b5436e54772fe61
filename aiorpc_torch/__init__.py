"""asyncio for `torch.distributed.rpc`: a remote call is an `await`.

    import aiorpc_torch as aiorpc

    async with aiorpc.local_world(["ps"]):
        ps = await aiorpc.create("ps", ParameterServer, lr=0.1)
        state = await aiorpc.remote(ps).update(grads)

Worlds: `worker` under a launcher, `local_world` in a program, `run_local` for a whole program,
`attach` beside `rpc.init_rpc`; `Tls` between hosts.
Calls: `create`, `remote`, `proxy`, `call`, `fetch`, `timeout`, `seconds_left`, `exclusive`,
`wrap_future`.
Objects that are made again: `supervised`, `supervised_all`, `Supervised`.
Groups and names: `create_all`, `each`, `Group`; `register`, `lookup`; `members`, `NamedMembers`.
Batches: `batched` with `Fill` or `Round`, `Broadcast`.
Counters: `stats`, `pending`.
Context variables and interceptors: `propagate`; `intercept`, `Interceptor`, `CallInfo`.
Membership: `Change`, which `Worker.changes` yields.
Plain torch clients: `async_execution`.
Errors: `RpcError` and its subclasses, and `RemoteTraceback`, the cause of remote exceptions.
Modules: `aiorpc_torch.autograd`, `aiorpc_torch.observe`, `aiorpc_torch.training` and
`aiorpc_torch.testing`.
Names with a leading underscore are private.
"""

# The packages. Imports go down this list only; `_batching`, `_client` and `_server` do not import
# each other.
#
#     __main__    the command line
#     _top        the viewer of running workers: probes, model, terminal
#     observe     traces and metrics, on the public names alone
#     training    versioned weights, staleness and replay, on the public names alone
#     testing     worlds, gates and leak checks for the tests of users
#     _world      the node, directory, failure detection, shutdown, child processes
#     _stats      counters of this process
#     autograd    contexts and optimizers of distributed autograd
#     _batching   @batched: policies, scheduler, queue, collation, results
#     _client     calls out: connection pool, connections, pending calls, streams in
#     _server     calls in: sessions, dispatch, executor, streams out
#     _protocol   names, exclusive objects, recorded calls, entry points for torch RPC
#     _sockets    tensors between hosts, on sockets of their own
#     _shm        segments in shared memory
#     _wire       what travels: frames, codec, state machines of both ends, handshake
#     _torch      the adapter to torch.distributed.rpc and to private interfaces
#     _port       one TCP port of a worker, and TLS on it
#     _aio        primitives of asyncio and threads, without torch
#     errors      exceptions that callers catch

from torch.distributed.rpc import RRef as RRef

from . import autograd as autograd
from ._aio.deadlines import seconds_left as seconds_left, timeout as timeout
from ._batching.decorator import batched as batched
from ._batching.policies import Fill as Fill, Round as Round
from ._batching.results import Broadcast as Broadcast
from ._batching.stats import BatchStats as BatchStats
from ._client.api import (
    call as call,
    create as create,
    fetch as fetch,
    proxy as proxy,
    remote as remote,
    supervised as supervised,
)
from ._client.group import (
    Group as Group,
    create_all as create_all,
    each as each,
    supervised_all as supervised_all,
)
from ._client.lookup import lookup as lookup
from ._client.named_members import NamedMembers as NamedMembers, members as members
from ._client.supervised import Supervised as Supervised
from ._port.tls import Tls as Tls
from ._protocol.interception import (
    CallInfo as CallInfo,
    Interceptor as Interceptor,
    intercept as intercept,
)
from ._protocol.names import register as register, unregister as unregister
from ._protocol.propagation import propagate as propagate
from ._server.exclusive import exclusive as exclusive
from ._server.torch_clients import async_execution as async_execution
from ._stats import Stats as Stats, stats as stats
from ._torch.transport import wrap_future as wrap_future
from ._version import __version__ as __version__
from ._world.attach import (
    AttachedThread as AttachedThread,
    attach as attach,
    attach_in_thread as attach_in_thread,
)
from ._world.changes import Change as Change
from ._world.local import (
    LocalWorker as LocalWorker,
    local_world as local_world,
    run_local as run_local,
)
from ._world.pending import PendingCall as PendingCall, pending as pending
from ._world.worker import Worker as Worker, worker as worker
from .errors import (
    BatchContractError as BatchContractError,
    CallTimeout as CallTimeout,
    GroupError as GroupError,
    NoMembers as NoMembers,
    NotExported as NotExported,
    NotInWorld as NotInWorld,
    QueueFull as QueueFull,
    RemoteError as RemoteError,
    RemoteTraceback as RemoteTraceback,
    RoundTimeout as RoundTimeout,
    RpcError as RpcError,
    UnknownWorker as UnknownWorker,
    WorkerGone as WorkerGone,
    WorkerLeft as WorkerLeft,
    WorkerLost as WorkerLost,
    WorkerUnreachable as WorkerUnreachable,
    WorldTimeout as WorldTimeout,
)

# What this module binds is public, but for `errors` itself, whose classes are bound.
__all__ = [name for name in dir() if not name.startswith("_") and name != "errors"]

# Tracebacks, `help` and pickles show the public name, which every release imports.
for _name in __all__:
    if getattr(globals()[_name], "__module__", "").startswith(f"{__name__}."):
        globals()[_name].__module__ = __name__
del _name
