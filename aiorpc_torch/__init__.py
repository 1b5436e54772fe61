"""asyncio for `torch.distributed.rpc`: a remote call is an `await`.

The map of the house, from the ground up; imports point down only.

    errors, _version, _seat                what can go wrong; which version; what a worker is
    _interfaces, _environment              network interfaces; torchrun's variables
    _devices, _fences                      CUDA: which is which of a peer's; order between threads
    _policy, _batcher, _rounds             when waiting requests become a batch (pure)
    _window, _pulse                        backpressure, signs of life (pure)
    _living                                what is alive, listed from any thread
    _exceptions, _deadline                 how exceptions and deadlines cross
    _errands, _rrefs                       for which batches a call is made; how RRefs cross
    _inbox, _threads, _wait                into a loop; threads for `def`s; out of a task and back
    _states                                of torch's threads, in Python: kept and given back
    _steps, _scopes, _interruption         a coroutine's steps, timed; deadlines; ends from outside
    _agent, _bridge, _tensors              torch's RPC; its futures awaited; tensors as bytes
    _passage                               what tensors pass so that no gradient is waited for
    _recording, _reply                     which calls are in which autograd context; their answers
    _wire                                  what a call asks for; values pickled
    _columns, _exports                     many values of one kind; what is answered to
    _message                               calls and results as they travel
    _protocol.frames                       bytes cut into frames, their length bounded (pure)
    _protocol.handshake                    how both ends prove that they were introduced (pure)
    _protocol.connection_state             when calls and results leave, and how many (pure)
    _protocol.payloads                     calls whose payload comes by torch RPC, in their order
    _protocol.endpoints                    the functions that peers call in this process by torch
    _protocol.forked                       closes connections in children made by `fork`
    _protocol.channel                      one connection on an event loop: reads, writes, closes
    _server.listener                       the listening sockets; verifies who connects
    _server.session                        one caller's connection: its calls, results held for it
    _jobs, _peers                          a call being answered; who may call, and who has left
    _incoming                              the caller's end of a stream: items in order, credit
    _streams, _pending                     the callee's end of a stream; who waits for what
    _arrivals, _runner                     from bytes to jobs; jobs on the loop or in a thread
    _server.server                         the callee: sessions, and calls that run for them
    _doors                                 how torch's own clients call what wants the loop
    _client.introduction                   how a caller gets a proven connection to a peer
    _client.answers                        answers of torch's, and a peer's last frame
    _client.connection                     one loop's calls to one peer, and their results
    _outbox, _calling, _remote             which connection a call takes; what the user types
    _stacking, _stage                      `@batched`: nests of tensors; on a CUDA device
    _answers, _admission                   what is whose; who may in
    _tally, _body, _queue                  what batches were like; the function; who waits for it
    _batched_types, _batched               what type checkers see, and what the user types
    _contexts                              a context of distributed autograd, from end to end
    _optimizer, autograd                   optimizers beside their parameters; what the user types
    _stats                                 what happens, in numbers
    _signals                               Ctrl-C and SIGTERM, in order
    _store, _vigil                         where workers meet; who lives
    _rendezvous, _place, _welcome          how they meet; which one to be; those who come back
    _joining, _leaving, _world             a worker's life
    _child, _crew, _local                  worlds on this machine
    _gate, _warm, _leaks, testing          for tests: gates, children at once, what is left behind
"""

from torch.distributed.rpc import RRef as RRef

from . import autograd as autograd
from ._answers import Broadcast as Broadcast
from ._batched import batched as batched
from ._bridge import wrap_future as wrap_future
from ._deadline import timeout as timeout
from ._doors import async_execution as async_execution
from ._local import local_world as local_world
from ._local import run_local as run_local
from ._place import Worker as Worker
from ._policy import Fill as Fill
from ._policy import Round as Round
from ._remote import call as call
from ._remote import create as create
from ._remote import fetch as fetch
from ._remote import remote as remote
from ._stats import Stats as Stats
from ._stats import stats as stats
from ._tally import BatchStats as BatchStats
from ._version import __version__ as __version__
from ._world import worker as worker
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
