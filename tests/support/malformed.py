"""Frames, pickles and results that are malformed, each under a name that says how."""

import pickle
from typing import Any

from aiorpc_torch._wire import plain
from aiorpc_torch._wire.wire_targets import NamedTarget


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


def head(*kinds: Any, names: Any = (), stream: Any = False, target: Any = POWER) -> bytes:
    """The head of a group whose columns are of these kinds."""
    return dump((target, stream, names, kinds))


def group(*columns: Any, numbers: Any = (0,), budgets: Any = (), **of_head: Any) -> Any:
    """A group of calls; each column is a pair of a kind and cells."""
    kinds, cells = [each[0] for each in columns], [each[1] for each in columns]
    return head(*kinds, **of_head), numbers, cells, budgets, ()


def packed(*data: bytes, **of_head: Any) -> Any:
    """A group whose arguments are pickled, without tensors."""
    return group(("packed", [(each, 0) for each in data]), names=None, **of_head)


ONE = ("plain", [1])
TWO = group(ONE, ONE)

HEADS: dict[str, Any] = {
    "nothing": b"",
    "a text": b"hello",
    "a number": dump(5),
    "no fields": dump(()),
    "a field too few": dump((POWER, False, ())),
    "a field too many": dump((POWER, False, (), (), ())),
    "a target that is none": head(target=5),
    "a target without its count": head(target=(POWER[0],)),
    "a target that is a text": head(target=("pow", 0)),
    "a name that is a number": head(target=(("method", (0, 5), 5, ""), 0)),
    "an object that is none": head(target=(("method", [], "quick", ""), 0)),
    "an object that is a text": head(target=(("method", "x", "quick", ""), 0)),
    "a stream that is a number": head(stream=1),
    "names that are numbers": head("plain", names=(1,)),
    "names of nothing": head("plain", names=("a", "b")),
    "packed, but not there": head(names=None),
    "packed, but plain": head("plain", names=None),
    "pickled, but a RemoteFailure": head("failed", names=None),
    "packed twice": head("packed", "packed", names=None),
    "a kind that is none": head("no"),
    "a kind that is a number": head(5),
    "a dtype that is none": head(("no", (1,), ())),
    "a dtype that no bytes have": head(("qint8", (1,), ())),
    "a dtype without a shape": head(("uint8",)),
    "a shape that is a number": head(("uint8", 5, ())),
    "no strides": head(("uint8", (1,))),
    "strides that are a number": head(("uint8", (1,), 5)),
    "a shape of texts": head(("uint8", ("x",), ())),
    "a class": dump(Foreign()),
    "raises": dump(Bad(KeyboardInterrupt)),
}
"""In place of the head of a group of calls."""

LIES: dict[str, Any] = {
    **{f"a head: {what}": [(data, [0], [])] for what, data in HEADS.items()},
    "a deep head": [(b"\x91" * 100_000, [0], [])],
    "columns that the head does not have": [(head(), [0], [[1], [2]])],
    "columns that are not there": [(head("plain", "plain"), [0], [])],
    "more in the column": [group(("plain", [1, 2]), ("plain", [3, 4]))],
    "less in the column": [group(("plain", []), ("plain", []))],
    "ends": [group(("ended", []))],
    "results that are held": [group(("held", [5]))],
    "tensors that are not there": [group(("tensor", []))],
    "empty tensors": [group((("uint8", (0,), ()), b""))],
    "a huge shape": [group((("uint8", (1 << 40,), ()), b"1"))],
    "a huge shape of nothing": [group((("uint8", (0, 1 << 62, 1 << 62), ()), b""))],
    "strides that lead out": [group((("uint8", (2, 2), (1, 3)), b"1234"))],
    "strides that lead back": [group((("uint8", (2, 2), (-1, 2)), b"1234"))],
    "huge strides": [group((("uint8", (2, 2), (1 << 62, 1 << 62)), b"1234"))],
    "a huge stride of one element": [group((("uint8", (2, 1), (1, 1 << 63)), b"12"))],
    "too few strides": [group((("uint8", (2, 2), (1,)), b"1234"))],
    "strides of fewer than none": [group((("uint8", (-2, -2), (1, 2)), b"1234"))],
    "fewer than none": [group((("uint8", (-1, -2), ()), b"12"))],
    "too few bytes": [group((("float64", (2,), ()), b"12345678"))],
    "too many bytes": [group((("uint8", (2,), ()), b"12345678"))],
    "tensors that are no bytes": [group((("uint8", (1,), ()), [1]))],
    "plain, but bytes": [group(("plain", b"1"))],
    "packed, but a number": [group(("packed", [5]), names=None)],
    "packed, with less than no tensors": [group(("packed", [(b"", -1)]), names=None)],
    "a target with less than no tensors": [group(ONE, ONE, target=(POWER[0], -1))],
    "a target with tensors that are not there": [
        group(("tensor", []), target=(POWER[0], 1 << 62)),
    ],
    "a target of no kind": [group(target=(("no", None, "pow", "math"), 0))],
    "a function of an object": [group(ONE, ONE, target=(("function", (0, 1), "pow", "math"), 0))],
    "a method of nothing": [group(target=(("method", None, "quick", ""), 0))],
    "a method of an RRef that is none": [group(target=(("method", b"x", "quick", ""), 0))],
    "a stream of it": [group(("ended", []), stream=True)],
    "lies behind what is none": [TWO, group(("tensor", []), numbers=(1,))],
}
"""Frames of calls of which each call fails."""


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
    "a field too few": dump([("plain", [1])]),
    "a field too many": dump([("plain", [1], [1], [])]),
    "no key": dump([("plain", [[]], [1])]),
    "a long key": dump([("plain", [(0, 0, 0, 0)], [1])]),
    "an item of a call": lambda base: dump([("plain", [(base, 0, 1)], [1])]),
    "an item's cost": lambda base: dump([("plain", [(base + 4, 0, "x")], [1])]),
    "a key that is a text": dump([("plain", ["abc"], [1])]),
    "fewer values than keys": dump([("plain", [1, 2], [1])]),
    "more values than keys": dump([("plain", [1], [1, 2])]),
    "plain, but bytes": dump([("plain", [1], b"1")]),
    "a kind that is none": dump([("no", [1], [1])]),
    "a dtype that is none": dump([(("no", (), ()), [1], b"")]),
    "tensors that are not there": dump([("tensor", [1], [])]),
}
