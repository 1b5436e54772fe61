"""Frames of one call or one result, without pickling. Most frames are of these kinds.

Such a call has a method of an RRef id and at most one small argument. `encode_call` and
`encode_result` return None for any other, which is sent by `messages`. Both encodings decode to
equal values (tests/unit/protocol/test_lone.py).
"""

import struct
import sys
from typing import Any

import torch
from torch import Tensor

from .._torch.rrefs import RRefId
from .frames import CALL, HEADER, RESULT, ProtocolError
from .targets import MethodTarget
from .tensors import from_bytes, small_bytes

# Each with the header of its frame to write it, and without the header to read it.
_READ_CALL = struct.Struct("<QH")  # number, bytes of the target
_READ_RESULT = struct.Struct("<Q")
_CALL = struct.Struct(HEADER.format + "QH")
_RESULT = struct.Struct(HEADER.format + "Q")
_RREF_ID = struct.Struct("<qq")
_INT = struct.Struct("<Bq")
_FLOAT = struct.Struct("<Bd")
_SHAPES = [struct.Struct(f"<BB{size}Q") for size in range(9)]  # dtype, dimensions, shape

# Codes of values. Smaller codes are indices of DTYPES, which all supported versions of torch have.
NONE, FALSE, TRUE, INT, FLOAT, STR, BYTES = range(64, 71)
_CONSTANTS = {NONE: None, FALSE: False, TRUE: True}
_ENCODED = {None: bytes((NONE,)), False: bytes((FALSE,)), True: bytes((TRUE,))}

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

MAX_TEXT = 4096  # bytes of a target, a str or bytes


def encode_method(rref_id: RRefId, name: str) -> bytes | None:
    """Return the target of calls of method `name`, None if `messages` must encode them."""
    target = _RREF_ID.pack(*rref_id) + name.encode()
    return target if len(target) <= MAX_TEXT else None


def encode_call(number: int, target: bytes, args: tuple[Any, ...]) -> bytes | None:
    """Return the frame of a call of `target`, None if `messages` must encode it."""
    if len(args) > 1:  # a tensor that is passed twice must arrive as one object
        return None
    value = encode_value(args[0]) if args else b""
    if value is None:
        return None
    size = len(target)
    head = _CALL.pack(_READ_CALL.size + size + len(value), CALL, number, size)
    return head + target + value


def decode_call(data: bytes) -> tuple[int, bytes, tuple[Any, ...]]:
    """Return the number, the target and the arguments of a call.

    Raises:
        ProtocolError, struct.error, ValueError, IndexError: if the frame is malformed.
    """
    number, size = _READ_CALL.unpack_from(data)
    if size > MAX_TEXT:
        raise ProtocolError(f"a target of {size} bytes")
    start = _READ_CALL.size + size
    target = data[_READ_CALL.size : start]
    return number, target, () if start == len(data) else (decode_value(data, start),)


def decode_method(target: bytes) -> MethodTarget:
    """Return the method that a target stands for; its name is interned for fast look-up."""
    name = sys.intern(target[_RREF_ID.size :].decode())
    return MethodTarget(_RREF_ID.unpack_from(target), name)


def encode_result(number: int, value: Any) -> bytes | None:
    """Return the frame of a result, None if `messages` must encode it."""
    encoded = encode_value(value)
    if encoded is None:
        return None
    return _RESULT.pack(_READ_RESULT.size + len(encoded), RESULT, number) + encoded


def decode_result(data: bytes) -> tuple[int, Any]:
    """Return the number of a call and its result. Raises the same as `decode_call`."""
    return _READ_RESULT.unpack_from(data)[0], decode_value(data, _READ_RESULT.size)


def encode_value(value: Any) -> bytes | None:
    """Return a small tensor, number, str or bytes as bytes, None for any other value."""
    kind = type(value)
    if kind is Tensor:
        code, data = _CODES.get(value.dtype), small_bytes(value)
        if code is None or data is None or len(shape := value.shape) >= len(_SHAPES):
            return None
        return _SHAPES[len(shape)].pack(code, len(shape), *shape) + data
    if kind is float:
        return _FLOAT.pack(FLOAT, value)
    if kind is int:
        return _INT.pack(INT, value) if -(2**63) <= value < 2**63 else None
    if value is None or kind is bool:
        return _ENCODED[value]
    if kind is bytes and len(value) <= MAX_TEXT:
        return b"%c%b" % (BYTES, value)
    if kind is str and len(value) <= MAX_TEXT // 4:
        return b"%c%b" % (STR, value.encode("utf-8", "surrogatepass"))
    return None


def decode_value(data: bytes, start: int) -> Any:
    """Return the value encoded from `start` on. Raises the same as `decode_call`."""
    code = data[start]
    if code < len(DTYPES):
        layout = _SHAPES[data[start + 1]]
        _, _, *shape = layout.unpack_from(data, start)
        return from_bytes((DTYPES[code], tuple(shape)), data[start + layout.size :], 1)[0]
    if code == INT:
        return _INT.unpack_from(data, start)[1]
    if code == FLOAT:
        return _FLOAT.unpack_from(data, start)[1]
    if code == STR:
        return data[start + 1 :].decode("utf-8", "surrogatepass")
    if code == BYTES:
        return data[start + 1 :]
    if code not in _CONSTANTS:
        raise ProtocolError(f"unknown code of a value: {code}")
    return _CONSTANTS[code]
