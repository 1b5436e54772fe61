"""asyncio for `torch.distributed.rpc`: a remote call is an `await`.

    import aiorpc_torch as aiorpc

    async with aiorpc.local_world(["ps"]):
        ps = await aiorpc.create("ps", ParameterServer, lr=0.1)
        state = await aiorpc.remote(ps).update(grads)

Worlds: `local_world` in a program, `run_local` for a whole program, `worker` under a launcher,
`attach` beside `rpc.init_rpc`; `in_thread` for synchronous code and notebooks; `Tls` between hosts.
Calls: `create`, `remote`, `call`, `proxy`, `fetch`; `supervised` for objects that are made again;
`timeout`, `seconds_left`, `exclusive`, `max_concurrency`, `is_cancelled`, `paused`.
Batches: `batched` with `Fill` or `Round`; `Broadcast`, `each`.
Groups and names: `Group`, `members`; `register`, `unregister`, `lookup`.
Beside plain torch RPC: `RRef`, `wrap_future`, `async_execution`.
Errors: `RpcError` and its subclasses, and `GroupError`.
Modules: `aiorpc_torch.autograd`, `aiorpc_torch.observe`, `aiorpc_torch.training`,
`aiorpc_torch.testing`; `aiorpc_torch.types` for annotations, `aiorpc_torch.errors`.
Names with a leading underscore are private.
"""

# docs/design.md lists the packages, and the path of a call through them. `lint-imports` checks
# which may import which (pyproject.toml).

from typing import TYPE_CHECKING

from . import autograd as autograd, errors as errors, types as types
from ._aio.deadlines import seconds_left, timeout
from ._batching.decorator import batched
from ._batching.policies import Fill, Round
from ._batching.results import Broadcast
from ._children.local import local_world, run_local
from ._client.api import call, create, fetch, proxy, remote, supervised
from ._client.group import Group, each
from ._client.named_members import lookup, members
from ._client.paused import paused
from ._context.cancellation import is_cancelled
from ._endpoint.names import register, unregister
from ._names import attributes_of as _attributes_of, show_as as _show_as
from ._port.tls import Tls
from ._server.exclusive import exclusive, max_concurrency
from ._server.torch_clients import async_execution
from ._torch.public_rref import RRef
from ._torch.transport import wrap_future
from ._version import __version__ as __version__
from ._world.attach import attach
from ._world.thread import in_thread
from ._world.worker import worker
from .errors import (
    BatchContractError,
    CallTimeout,
    GroupError,
    NoMembers,
    NotExported,
    NotInWorld,
    QueueFull,
    RemoteError,
    RoundTimeout,
    RpcError,
    UnknownWorker,
    WorkerGone,
    WorkerLeft,
    WorkerLost,
    WorkerUnreachable,
    WorldTimeout,
)

if TYPE_CHECKING:
    from . import observe as observe, testing as testing, training as training

# In the order in which people need them.
__all__ = (  # noqa: RUF022
    "local_world",
    "run_local",
    "worker",
    "attach",
    "in_thread",
    "Tls",
    "create",
    "remote",
    "call",
    "fetch",
    "proxy",
    "RRef",
    "timeout",
    "seconds_left",
    "exclusive",
    "max_concurrency",
    "is_cancelled",
    "paused",
    "batched",
    "Fill",
    "Round",
    "Broadcast",
    "each",
    "Group",
    "members",
    "register",
    "unregister",
    "lookup",
    "supervised",
    "RpcError",
    "CallTimeout",
    "WorkerGone",
    "WorkerLost",
    "WorkerLeft",
    "WorkerUnreachable",
    "GroupError",
    "NoMembers",
    "NotInWorld",
    "UnknownWorker",
    "NotExported",
    "RemoteError",
    "BatchContractError",
    "QueueFull",
    "RoundTimeout",
    "WorldTimeout",
    "wrap_future",
    "async_execution",
)

_show_as(__name__, globals(), __all__)
_show_as(types.__name__, vars(types), types.__all__)

if not TYPE_CHECKING:  # which would take every name for one of the module
    __getattr__ = _attributes_of(__name__, modules=("observe", "testing", "training"))
