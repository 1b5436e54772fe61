"""Exceptions as users write them, and all that they carry."""

import asyncio
import copyreg
import dataclasses
import errno
import threading
from collections.abc import Callable
from typing import Any

from aiorpc_torch import (
    BatchContractError,
    CallTimeout,
    NotInWorld,
    RemoteError,
    RpcError,
    WorkerLost,
    WorldTimeout,
)
from aiorpc_torch.types import RemoteTraceback


class Formatted(Exception):
    """Several arguments, one formatted string to super."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"[{code}] {reason}")
        self.code = code
        self.reason = reason


class KeywordOnly(ValueError):
    def __init__(self, *, name: str, value: object) -> None:
        super().__init__(f"{name} is not {value!r}")
        self.name = name
        self.value = value


class NoSuper(Exception):
    """Never calls super: its arguments are those of the constructor."""

    def __init__(self, left: int, right: int) -> None:
        self.total = left + right


class Counting(Exception):
    """Its constructor has an effect that must not happen again at the other end."""

    made = 0

    def __init__(self, text: str) -> None:
        type(self).made += 1
        super().__init__(f"{text}!")


class Slotted(Exception):
    __slots__ = ("code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__("slotted")
        self.code = code


@dataclasses.dataclass
class Data(Exception):
    code: int
    text: str = "no text"


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@dataclasses.dataclass(frozen=True)
class FrozenEmpty(Exception):
    pass


class OsFormatted(OSError):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(errno.EACCES, reason, path)
        self.reason = reason


class Mixin:
    """Not an exception, and first among the bases."""

    def describe(self) -> str:
        return f"described {self}"


class Mixed(Mixin, LookupError):
    pass


class MyGroup(ExceptionGroup[Exception]):
    def __new__(cls, excs: list[Exception], label: str) -> "MyGroup":
        self = super().__new__(cls, f"group {label}", excs)
        self.label = label
        return self

    def __init__(self, excs: list[Exception], label: str) -> None:
        pass

    def derive(self, excs: Any) -> "MyGroup":
        return MyGroup(list(excs), self.label)


class OwnReduce(Exception):
    """Says itself how it is pickled."""

    def __init__(self, text: str, *, history: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.history = history

    def __reduce__(self) -> Any:
        return _own, (self.args[0], (*self.history, "reduced"))


def _own(text: str, history: tuple[str, ...]) -> OwnReduce:
    return OwnReduce(text, history=history)


class OwnState(Exception):
    """Only its state is its own to restore."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, restored=True)


class Registered(Exception):
    """Pickled by a function in `copyreg`."""

    def __init__(self, *, code: int) -> None:
        super().__init__("registered")
        self.code = code


copyreg.pickle(Registered, lambda exc: (_registered, (exc.code,)))


def _registered(code: int) -> Registered:
    return Registered(code=code)


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("in __reduce__")


class BadStr(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("in __str__")


class BadState(Exception):
    def __setstate__(self, state: Any) -> None:
        raise ZeroDivisionError("in __setstate__")


class Unreadable(Exception):
    """Pickles, and comes back as something that is no exception."""

    def __reduce__(self) -> Any:
        return str, ("not an exception",)


class SubCancelled(asyncio.CancelledError):
    pass


def local(text: str) -> Exception:
    class Local(Exception):
        pass

    return Local(text)


def with_attributes(exc: BaseException, **attributes: object) -> BaseException:
    vars(exc).update(attributes)
    return exc


def with_notes(exc: BaseException, *notes: str) -> BaseException:
    for note in notes:
        exc.add_note(note)
    return exc


INTACT: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: Exception(),
    "several arguments": lambda: ValueError("a", 1, None, (2.5, {"k": [1]})),
    "KeyError": lambda: KeyError("missing"),
    "KeyError of a tuple": lambda: KeyError(("a", 1)),
    "OSError of three": lambda: OSError(2, "x", "file"),
    "OSError of two files": lambda: OSError(18, "x", "from", None, "to"),
    "OSError of a text": lambda: OSError("only text"),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", "/tmp/ö"),
    "BlockingIOError": lambda: BlockingIOError(11, "again", 7),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff\xfe", 0, 1, "invalid"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("ascii", "ö", 0, 1, "ordinal"),
    "ImportError": lambda: ImportError("no", name="pkg.mod", path="/x/y.py"),
    "ModuleNotFoundError": lambda: ModuleNotFoundError("no", name="pkg"),
    "SyntaxError": lambda: SyntaxError("bad", ("f.py", 3, 7, "x = = 1", 3, 8)),
    "AssertionError": lambda: AssertionError("1 != 2"),
    "RecursionError": lambda: RecursionError("deep"),
    "TimeoutError": lambda: TimeoutError("late"),
    "StopIteration in an argument": lambda: ValueError(StopIteration(3)),
    "formatted": lambda: Formatted(503, "busy"),
    "keyword only": lambda: KeywordOnly(name="lr", value=-1.0),
    "no super": lambda: NoSuper(1, 2),
    "slots": lambda: Slotted(7),
    "dataclass": lambda: Data(3),
    "dataclass by keyword": lambda: Data(code=3, text="t"),
    "frozen dataclass": lambda: Frozen(3),
    "frozen dataclass by keyword": lambda: Frozen(code=3),
    "frozen dataclass without fields": lambda: FrozenEmpty(),
    "OSError with a constructor": lambda: OsFormatted("/etc/x", "denied"),
    "mixin": lambda: Mixed("here"),
    "attributes set later": lambda: with_attributes(ValueError("x"), code=3, seen=[1, {2}]),
    "attributes on a formatted one": lambda: with_attributes(Formatted(1, "x"), extra="more"),
    "notes": lambda: with_notes(ValueError("x"), "first note", "zweite, ä\\n"),
    "umlauts, emoji, backslashes": lambda: ValueError("C:\\users\\xyz\\N{x} größer 🦊 \x00 \u2028"),
    "lone surrogate": lambda: ValueError("\udc80"),
    "bytes": lambda: ValueError(b"\x00\xff"),
    "exception as an argument": lambda: ValueError(Formatted(1, "inner")),
    "exception as an attribute": lambda: with_attributes(ValueError(), inner=Formatted(1, "x")),
    "WorkerLost": lambda: WorkerLost("ps", "it was killed"),
    "WorkerLost by a call": lambda: WorkerLost("ps", "it was killed", method="PS.update"),
    "CallTimeout": lambda: CallTimeout("no answer in 3 s"),
    "CallTimeout of a call": lambda: CallTimeout("too late", worker="ps", method="PS.update"),
    "WorldTimeout": lambda: WorldTimeout("ranks 1 and 2 are missing", [1, 2]),
    "NotInWorld": lambda: NotInWorld("nobody"),
    "RemoteError": lambda: RemoteError("worker 'a' raised X"),
    "RpcError": lambda: RpcError("something"),
    "RemoteTraceback": lambda: RemoteTraceback("ps", "Traceback: ö\\x"),
    "BatchContractError": lambda: BatchContractError("f returned None"),
}


def look(exc: object) -> object:
    """All that an exception carries, as values to compare."""
    if isinstance(exc, BaseException):
        slots = [name for cls in type(exc).__mro__ for name in cls.__dict__.get("__slots__", ())]
        own = {name: getattr(exc, name) for name in slots if hasattr(exc, name)} | vars(exc)
        fields = "errno strerror filename filename2 characters_written name path msg lineno text"
        own |= {name: getattr(exc, name, None) for name in fields.split()} | own
        return type(exc), look(exc.args), look(own)
    if isinstance(exc, list | tuple):
        return [look(value) for value in exc]
    if isinstance(exc, dict):
        return {key: look(value) for key, value in exc.items()}
    return exc


TEXT_ONLY: dict[str, Callable[[], BaseException]] = {
    "StopIteration": lambda: StopIteration("text of it"),
    "StopAsyncIteration": lambda: StopAsyncIteration("text of it"),
    "SystemExit": lambda: SystemExit("text of it"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("text of it"),
    "CancelledError": lambda: asyncio.CancelledError("text of it"),
    "subclass of CancelledError": lambda: SubCancelled("text of it"),
    "GeneratorExit": lambda: GeneratorExit("text of it"),
    "local class": lambda: local("text of it"),
    "lock as an attribute": lambda: with_attributes(ValueError("text of it"), a=threading.Lock()),
    "lock as an argument": lambda: ValueError("text of it", threading.Lock()),
    "lambda as an attribute": lambda: with_attributes(ValueError("text of it"), a=lambda: None),
    "raising __reduce__": lambda: BadReduce("text of it"),
    "raising __setstate__": lambda: with_attributes(BadState("text of it"), a=1),
    "comes back as a str": lambda: Unreadable("text of it"),
    "group with one that cannot": lambda: ExceptionGroup("g", [KeyError(1), local("text of it")]),
}


UNPRINTABLE: dict[str, Callable[[], BaseException]] = {
    "SyntaxError of nonsense": lambda: SyntaxError("text of it", ("f", "a", "b", "c", "d", "e")),
    "SyntaxError with numbers": lambda: with_text(SyntaxError("text of it"), 5),
    "notes that are none": lambda: with_attributes(ValueError("text of it"), __notes__=5),
    "a name that is none": lambda: NameError("text of it", name=5),
    "a cycle of causes": lambda: with_itself(ValueError("text of it")),
    "a module that is none": lambda: type("Odd", (Exception,), {"__module__": 5})("text of it"),
}


def with_text(exc: SyntaxError, text: Any) -> SyntaxError:
    exc.lineno, exc.text = 1, text
    return exc


def with_itself(exc: BaseException) -> BaseException:
    exc.__cause__ = exc
    return exc
