"""`paused`: a block in which only its own calls of some objects run."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from .._endpoint.pauses import pause_object
from .._handles.handles import of_handle
from .._torch.compat import RRefBase
from .._torch.rrefs import identity, owner_name, rref_id
from .._wire.ancestry import BatchId, BatchScope, add_scope, from_wire
from .._wire.targets import FunctionTarget
from ..errors import RpcError
from .call import RemoteCall
from .group import Group
from .named_members import NamedMembers
from .pool import current
from .supervised import Supervised


@contextlib.asynccontextmanager
async def paused(objects: Any) -> AsyncIterator[None]:
    """Let no calls of some objects run in this block but those that it makes.

        async with aiorpc.paused(learner):
            score = await evaluate(learner)  # no update in between

    The block is entered when the calls, streams and batches of the objects that run have ended, and
    those that wait for a turn. Later calls wait, within their deadlines. The block's own calls run,
    and those that they make in turn, also of other tasks that it starts. The others go on in their
    order when the block ends, or its worker is lost. A pause of an object that is paused already
    waits too; inside the block of its own holder it begins at once.

    Calls that the process of an object makes directly, as plain Python, do not wait. A call that
    runs may make calls of the same object: these run too. If it waits for a call of another worker
    that was made before the pause and calls the object, they may wait for each other: after two
    seconds without an end, the calls that have waited run before the block.

    Args:
        objects: an RRef, a supervised object, what `remote` returns for either, a Group, or
            `members(name)`: those that are there at the entry.

    Raises:
        TypeError: if `objects` is something else.
        CallTimeout: if the deadline of `aiorpc.timeout` passes before the block is entered.
        WorkerGone: from the entry, if the worker of an object is gone.
        NotInWorld: outside a world.
    """
    scopes: set[BatchId] = set()
    is_open = True
    async with contextlib.AsyncExitStack() as stack:
        # In one order everywhere: two holders of several objects do not wait for each other.
        for owner, rref in _in_order(of_handle(objects)):
            name, number = await stack.enter_async_context(_pause(owner, rref))
            scopes.add((name or owner, number))
        here = BatchScope(from_wire(current().worker, scopes), lambda: is_open)
        try:
            with add_scope(here):
                yield
        finally:
            is_open = False


@contextlib.asynccontextmanager
async def _pause(owner: str, rref: Any) -> AsyncIterator[BatchId]:
    pause = RemoteCall(owner, FunctionTarget(pause_object), None, rref_id(rref) or rref)
    found = await pause.__aenter__()
    try:
        yield found
    finally:
        with contextlib.suppress(RpcError):  # its worker is lost, or the deadline has passed
            await pause.__aexit__(None, None, None)


def _in_order(objects: Any) -> list[tuple[str, Any]]:
    members = [*objects] if isinstance(objects, Group | NamedMembers) else [objects]
    found = {}
    for each in members:
        if not isinstance(each, RRefBase | Supervised):
            raise TypeError(f"paused takes an RRef, a supervised object or a group, got {each!r}")
        rref = each.rref if isinstance(each, Supervised) else each
        found[identity(rref)] = rref
    named = [(owner_name(rref), key, rref) for key, rref in found.items()]
    return [(owner, rref) for owner, _, rref in sorted(named, key=lambda each: str(each[:2]))]
