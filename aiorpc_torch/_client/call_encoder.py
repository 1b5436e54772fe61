"""The encoding of calls to one peer: alone, in a frame with others, or as a member of a group.

The encoded method of an RRef is remembered, since a caller mostly repeats it.
"""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch

from .._protocol.ancestry import entered_scopes, to_wire
from .._protocol.exceptions import try_add_note
from .._protocol.lone import encode_call, encode_method
from .._protocol.messages import (
    Arguments,
    EncodedCall,
    encode_grouped_call,
)
from .._protocol.recording import record_for_call
from .._protocol.shared_arguments import MemberArguments
from .._protocol.targets import MethodTarget, Target, call_name, order_key
from .._protocol.wire_targets import METHOD, EncodedTarget, NamedTarget, encode_target
from .._torch import rrefs
from .._torch.rrefs import RRefId

MAX_METHODS = 256  # that an encoder remembers

_Method = tuple[Callable[[], Any], EncodedTarget, bytes | None]
"""A method of an RRef: a weak reference to the RRef, and the target for groups and lone calls."""


class CallEncoder:
    """The encoder of the calls from worker `caller` to worker `peer`.

    Args:
        devices: those that tensors for the peer may be on, beside the CPU.
    """

    def __init__(self, caller: str, peer: str, devices: Collection[torch.device] = ()) -> None:
        self._caller = caller
        self._peer = peer
        self._devices = devices
        self._methods: dict[str, _Method] = {}  # by name

    def lone(
        self, number: int, target: Target, args: tuple[Any, ...]
    ) -> tuple[EncodedTarget, bytes] | None:
        """Return the target and the frame of a call, None if `call` has to encode it."""
        if type(target) is not MethodTarget:
            return None
        known = self._methods.get(target.name)
        if known is None or known[0]() is not target.on:
            known = self._find_method(target)
        _, key, method = known
        if method is None or entered_scopes() or record_for_call() is not None:
            return None
        data = encode_call(number, method, args)
        return None if data is None else (key, data)

    def call(
        self, number: int, target: Target, stream: bool, args: Arguments, due: float | None
    ) -> EncodedCall:
        """Encode a call. Raises what pickling raises, and for a tensor that cannot be sent."""
        known = self._methods.get(target.name) if type(target) is MethodTarget else None
        if known is not None and known[0]() is target.on:
            encoded = known[1]
        else:
            encoded = encode_target(target, _rref_id(target))
        batches = to_wire(self._caller) if entered_scopes() else ()
        try:
            call = encode_grouped_call(number, encoded, stream, args, due, batches)
            if call.header[2] is None:  # pickled as a whole
                call.cells[0].check_sendable(self._devices, self._peer)
        except Exception as exc:
            name, peer = call_name(target), self._peer
            try_add_note(exc, f"(while pickling the arguments of {name} for worker {peer!r})")
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
        return arguments.call(number, target, due, to_wire(self._caller))

    def _find_method(self, target: MethodTarget) -> _Method:
        """Return the encoded method of `target`, and remember it."""
        rref_id, name = _rref_id(target), target.name
        if rref_id is None:  # packing such an RRef forks it, as `call` does
            return _no_rref, NamedTarget(METHOD, (0, 0), name), None
        if isinstance(target.on, tuple):
            return _no_rref, NamedTarget(METHOD, rref_id, name), encode_method(rref_id, name)
        if len(self._methods) >= MAX_METHODS:
            self._methods.clear()
        key, encoded = NamedTarget(METHOD, rref_id, name), encode_method(rref_id, name)
        known = self._methods[name] = weakref.ref(target.on), key, encoded
        return known


def slot_key(target: Target) -> Any:
    """Return the key of a call's slot: its object or function; None if that is unknown."""
    return _rref_id(target) or order_key(target)


def _rref_id(target: Target) -> RRefId | None:
    """Return the RRef id of a call's object, None if only torch can find the object."""
    on = target.on
    return on if on is None or isinstance(on, tuple) else rrefs.rref_id(on)


def _no_rref() -> None:
    return None
