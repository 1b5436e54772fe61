"""The encoding of calls to one peer, of its own or as a member of a group.

The encoded method of an RRef is remembered, since a caller mostly repeats it.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .._context.recording import current_record
from .._torch import rrefs
from .._torch.compat import current_context_id
from .._torch.devices import NO_DEVICES, DeviceMapping
from .._torch.rrefs import RRefId
from .._wire.ancestry import awaited, entered_scopes, to_wire
from .._wire.columns import PACKED, CellKind
from .._wire.exceptions import try_add_note
from .._wire.messages import (
    Arguments,
    EncodedCall,
    EncodedHead,
    HeadCache,
    encode_call,
)
from .._wire.pickling import PickledValue
from .._wire.shared_arguments import MemberArguments
from .._wire.staged import stage
from .._wire.targets import MethodTarget, Target, call_name, order_key
from .._wire.wire_targets import EncodedTarget, encode_target

MAX_METHODS = 256  # that an encoder remembers
MAX_KINDS = 64  # of one argument, for each of them

PICKLED = (PACKED,)
"""Kinds of arguments that are pickled together."""


class KnownMethod(NamedTuple):
    """A method of an RRef that lives while `rref` returns it.

    Attributes:
        heads: Those of calls with one argument, by its kind.
    """

    rref: Callable[[], Any]
    target: EncodedTarget
    heads: dict[CellKind, EncodedHead]


class CallEncoder:
    """The encoder of the calls from worker `caller` to worker `peer`.

    Args:
        devices: those that tensors for the peer may be on, beside the CPU, and the peer's for each.

    Attributes:
        heads: those of the calls.
        methods: the methods of RRefs that were called last, by name.
    """

    def __init__(self, caller: str, peer: str, devices: DeviceMapping = NO_DEVICES) -> None:
        self._caller = caller
        self._peer = peer
        self._devices = devices
        self.heads = HeadCache()
        self.methods: dict[str, KnownMethod] = {}

    def call(
        self, number: int, target: Target, stream: bool, args: Arguments, due: float | None
    ) -> EncodedCall:
        """Encode a call. Raises what pickling raises, and for a tensor that cannot be sent."""
        known = self.methods.get(target.name) if type(target) is MethodTarget else None
        if known is not None and known.rref() is target.on:
            encoded = known.target
        else:
            encoded = self._encode_target(target)
        batches = to_wire(self._caller) if entered_scopes() or awaited else ()
        try:
            call = encode_call(self.heads, number, encoded, stream, args, due, batches)
            if call.head.kinds == PICKLED and (packed := call.cells[0]).fence is not None:
                packed.check_sendable(self._devices, self._peer)
                staged = self._staged(packed, encoded)
                if staged is not packed:
                    call = call.with_pickled(staged)
        except Exception as exc:
            name, peer = call_name(target), self._peer
            hint = ": `await` it first" if "'coroutine' object" in str(exc) else ""
            text = f"(while pickling the arguments of {name} for worker {peer!r}{hint})"
            try_add_note(exc, text)
            raise
        return call

    def member_target(self, target: Target, arguments: MemberArguments) -> EncodedTarget:
        """Encode the target of a member's call, and check its arguments as `call` does."""
        if arguments.packed is not None:
            arguments.packed.check_sendable(self._devices, self._peer)
        return encode_target(target, _rref_id(target))

    def member_call(
        self, number: int, target: EncodedTarget, arguments: MemberArguments, due: float | None
    ) -> EncodedCall:
        """Encode a member's call."""
        packed = arguments.packed
        if packed is not None and packed.fence is not None:
            arguments = arguments.with_pickled(self._staged(packed, target))
        return arguments.call(self.heads, number, target, due, to_wire(self._caller))

    def _staged(self, packed: PickledValue, target: EncodedTarget) -> PickledValue:
        """Return arguments with tensors on devices as they travel."""
        if current_record() is not None or current_context_id() >= 0:  # torch sends the graph
            return packed
        if isinstance(target, PickledValue):  # it may have such tensors, which come otherwise
            return packed
        return stage(packed, self._devices)

    def _encode_target(self, target: Target) -> EncodedTarget:
        if type(target) is not MethodTarget:
            return encode_target(target, _rref_id(target))
        rref_id = _rref_id(target)
        encoded = encode_target(target, rref_id)
        # Without an id it is a fork of the RRef, which serves one call.
        if rref_id is not None and not isinstance(target.on, tuple):
            if len(self.methods) >= MAX_METHODS:
                self.methods.clear()
            self.methods[target.name] = KnownMethod(weakref.ref(target.on), encoded, {})
        return encoded

    def head_of_one(self, known: KnownMethod, kind: CellKind) -> EncodedHead:
        """Return the head of calls of a method with one argument, of that kind; remember it."""
        if len(known.heads) >= MAX_KINDS:
            known.heads.clear()
        head = known.heads[kind] = self.heads[known.target, False, (), (kind,)]
        return head


def slot_key(target: Target) -> Any:
    """Return the key of a call's slot: its object or function; None if that is unknown."""
    return _rref_id(target) or order_key(target)


def _rref_id(target: Target) -> RRefId | None:
    """Return the RRef id of a call's object, None if only torch can find the object."""
    on = target.on
    return on if on is None or isinstance(on, tuple) else rrefs.rref_id(on)
