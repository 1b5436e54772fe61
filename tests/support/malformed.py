"""Frames, pickles and results that are malformed, each under a name that says how."""

import pickle
from typing import Any

from aiorpc_torch._protocol import plain
from aiorpc_torch._protocol.wire_targets import NamedTarget


class Foreign:
    """A class, where only plain values are expected."""


class Bad:
    """What raises when it is unpickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return throw, (self.error,)


def throw(error: type[BaseException]) -> None:
    raise error("while it was unpickled")


def dump(fields: Any) -> bytes:
    """Bytes of a message; of a pickle, if no message can hold the fields."""
    try:
        return fields if isinstance(fields, bytes) else plain.dump(fields)
    except (TypeError, ValueError, OverflowError):
        return pickle.dumps(fields)


POWER = (NamedTarget("function", None, "pow", "math"), 0)


def calls(*groups: Any, numbers: Any = (0,), order: Any = (), budgets: Any = ()) -> Any:
    return numbers, order, groups, budgets


def group(count: int, *columns: Any, names: Any = (), stream: bool = False) -> Any:
    return POWER, stream, names, count, [*columns]


LIES: dict[str, Any] = {
    "calls without a group": calls(),
    "a group without calls": calls(group(0)),
    "more in the group": calls(group(10**12)),
    "ends, by the million": calls(group(1, ("ended", 10**12))),
    "ends, more than calls": calls(group(1, ("ended", 2))),
    "results that are held": calls(group(1, ("held", [5]))),
    "tensors that are not there": calls(group(1, ("tensor", 1))),
    "many tensors": calls(group(1, ("tensor", 10**12))),
    "fewer than none": calls(group(1, ("tensor", -1))),
    "empty tensors": calls(group(1, (("uint8", (0,)), (b"", 10**12)))),
    "a huge shape": calls(group(1, (("uint8", (1 << 40,)), (b"", 1)))),
    "too few bytes": calls(group(1, (("float64", (2,)), (b"12345678", 1)))),
    "too many bytes": calls(group(1, (("uint8", (2,)), (b"12345678", 1)))),
    "names of nothing": calls(group(1, ("plain", [1]), names=("a", "b"))),
    "packed, but not there": calls(group(1, names=None)),
    "packed, but plain": calls(group(1, ("plain", [5]), names=None)),
    "pickled, but a RemoteFailure": calls(group(1, ("failed", [(1, 2, 3, 4)]), names=None)),
    "an order without end": calls(group(1), order=(0, 0)),
    "an order beyond": calls(group(1), order=(7,)),
    "an order too short": calls(group(2), numbers=(0, 1), order=(0,)),
    "a stream of it": calls(group(1, ("ended", 10**9), stream=True)),
}


def nested(depth: int) -> bytes:
    return pickle.EMPTY_LIST * depth + pickle.APPEND * (depth - 1) + pickle.STOP


BYTES = {
    "none": b"",
    "text": b"hello",
    "nothing": dump(None),
    "a long text that is not there": b"\xdb\xff\xff\xff\xff",
    "many bytes that are not there": b"\xc6\xff\xff\xff\xff",
    "an array that is not there": b"\xdd\xff\xff\xff\xff",
    "arrays that are not there, in each other": b"\xdd\xff\xff\xff\xff" * 10_000,
    "a map that is not there": b"\xdf\xff\xff\xff\xff",
    "an extension": b"\xc7\x01\x05a",
    "a text that is not UTF-8": b"\xa2\xff\xfe",
    "deep": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "a pickle": pickle.dumps(None),
    "a class": pickle.dumps(Foreign()),
    "a function": pickle.dumps(throw),
    "an error": pickle.dumps(Bad(SystemExit)),
}


PICKLES = {
    "none": b"",
    "no pickle": b"hello",
    "a pickle of nothing": pickle.dumps(None),
    "a long text that is not there": pickle.PROTO + b"\x05" + pickle.BINUNICODE8 + b"\xff" * 8,
    "many bytes that are not there": pickle.BINBYTES8 + (1 << 36).to_bytes(8, "little") + b".",
    "more bytes than can be": pickle.BINBYTES8 + (1 << 62).to_bytes(8, "little") + b".",
    "a frame that is not there": pickle.FRAME + (1 << 60).to_bytes(8, "little"),
    "a number without end": pickle.LONG4 + b"\xff\xff\xff\x7f" + b"\x01",
    "deep": nested(100_000),
    "a class": pickle.dumps(Foreign()),
    "a function": pickle.dumps(throw),
    "an error": pickle.dumps(Bad(SystemExit)),
}
"""In place of the pickle of a user's value."""

NONSENSE: dict[str, Any] = {
    "nothing": b"",
    "a number": dump(5),
    "a text": b"hello",
    "a class": dump(Foreign()),
    "raises": dump(Bad(KeyboardInterrupt)),
    "no columns": dump((5, [])),
    "ends": dump([([0], ("ended", 10**12))]),
    "no key": dump([([[]], ("plain", [1]))]),
    "a long key": dump([([(0, 0, 0, 0)], ("plain", [1]))]),
    "an item of a call": lambda base: dump([([(base, 0, 1)], ("plain", [1]))]),
    "an item's price": lambda base: dump([([(base + 4, 0, "x")], ("plain", [1]))]),
    "a key that is a text": dump([(["abc"], ("plain", [1]))]),
    "fewer values than keys": dump([([1, 2], ("plain", [1]))]),
}
