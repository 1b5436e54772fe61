"""`paused`: a block in which only its own calls of some objects run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .._aio.deadlines import deadline_in
from .._endpoint.answers import pause_object, settle_pause
from .._handles.handles import of_handle
from .._handles.mistakes import async_only
from .._torch.compat import RRefBase
from .._torch.rrefs import identity, owner_name, rref_id
from .._wire.ancestry import (
    BatchId,
    BatchScope,
    current_scopes,
    enter_scopes,
    from_wire,
    new_batch,
    running_call,
)
from .._wire.targets import FetchTarget, FunctionTarget
from ..errors import CallTimeout, RpcError
from .call import RemoteCall
from .group import Group
from .named_members import NamedMembers
from .pool import current
from .routes import Route
from .supervised import Supervised


@async_only
async def paused(objects: Any) -> AsyncIterator[None]:
    """Let no calls of some objects run in this block but those that it makes.

        async with aiorpc.paused(learner):
            score = await evaluate(learner)  # no update in between

    The block is entered when the calls, streams and batches of the objects that run have ended, and
    those that wait for a turn. Later calls wait, within their deadlines. The block's own calls run,
    and those that they make in turn, also of other tasks that it starts. The others go on in their
    order when the block ends, or its worker is lost. A pause of an object that is paused already
    waits too; inside the block of its own holder it begins at once.

    A call that the block waits for may make calls of the objects: these run before it, too. Or it
    waits for another worker, whose call of an object waits for the block. So all calls that have
    waited run before the block if no call has ended for two seconds. The next time it is twice as
    long. Set a deadline where two sides may wait for each other, as for `exclusive`.

    Calls that the process of an object makes directly, as plain Python, and those of plain torch
    clients do not wait.

    Args:
        objects: an RRef, a supervised object, what `remote` returns for either, a Group, or
            `members(name)`: those that are there at the entry.

    Raises:
        TypeError: if `objects` is something else.
        CallTimeout: if the deadline of `aiorpc.timeout` passes before the block is entered.
        WorkerGone: from the entry if the worker of an object is gone; at the end if it is lost
            since, and so the pause.
        RuntimeError: in a method of an object with a limit (`exclusive`) that pauses it.
        NotInWorld: outside a world.
    """
    current()  # torch's own error tells of no world
    members = await _in_order(of_handle(objects))
    is_open = True
    async with contextlib.AsyncExitStack() as stack:
        mark = current().worker, new_batch()[1]
        ids = set()
        # In one order everywhere: two holders of several objects do not wait for each other.
        for each in members:
            pause = _pause(*each, mark, enters=len(members) == 1)
            name, number = await stack.enter_async_context(pause)
            ids.add((name or each[0], number))
        if len(members) > 1:
            # Until no call of any runs: what ran of one may have called another one, whose calls
            # had ended before. Then none passes any more.
            while sum(await _settled(members, enters=False)):
                pass
            await _settled(members, enters=True)
        scopes = current_scopes()
        enter_scopes(scopes | {BatchScope(from_wire(current().worker, ids), lambda: is_open)})
        try:
            yield
        finally:
            is_open = False
            enter_scopes(scopes)


@contextlib.asynccontextmanager
async def _pause(owner: str, rref: Any, mark: BatchId, *, enters: bool) -> AsyncIterator[BatchId]:
    own = running_call() if owner == current().worker else None
    arguments = rref_id(rref) or rref, mark, own, enters
    # By the RRef: another process may have the owner's name by now.
    pause = RemoteCall(rref, FunctionTarget(pause_object), None, *arguments)
    try:
        found = await pause.__aenter__()
    except CallTimeout as exc:
        text = f"paused: calls of an object on worker {owner!r} still ran at the deadline"
        # In no variable: it would be a cycle, which keeps what the caller's frames hold.
        raise CallTimeout(text, worker=owner, method="paused", may_have_run=False) from exc
    pause.outlive_deadline()  # that is of the entry
    has_ended = False
    try:
        yield found
        has_ended = True
    finally:
        with contextlib.nullcontext() if has_ended else contextlib.suppress(RpcError):
            await pause.__aexit__(None, None, None)


async def _settled(members: Sequence[tuple[str, Any]], *, enters: bool) -> list[int]:
    target = FunctionTarget(settle_pause)
    calls = [RemoteCall(rref, target, None, rref_id(rref) or rref, enters) for _, rref in members]
    return await asyncio.gather(*calls)


async def _in_order(objects: Any) -> list[tuple[str, Any]]:
    """Return the workers and RRefs of objects, sorted."""
    members = [*objects] if isinstance(objects, Group | NamedMembers) else [objects]
    found = {}
    for each in members:
        rref = each
        if isinstance(each, Supervised):
            route = Route(each, FetchTarget(each.rref), deadline_in(None), 0)
            rref, _ = route.choose() or await route.ready()
        elif not isinstance(each, RRefBase):
            hint = ": write Group([...])" if isinstance(each, list | tuple) else ""
            raise TypeError(
                f"paused takes an RRef, a supervised object or a group, got {each!r}{hint}"
            )
        found[owner_name(rref), identity(rref)] = rref
    return [(owner, found[owner, key]) for owner, key in sorted(found)]
