"""Functions and classes that travel by value, with `cloudpickle`.

These are lambdas, functions and classes of `<locals>`, and those of a `__main__` without a file: a
notebook's, or a prompt's. A peer cannot import them. Everything else travels by name.

Each has an identity: the process that sent it first, and a number. A class that arrives again is
the class that arrived before. A class or function that returns to its sender is the
sender's own object.
(tests/unit/wire/test_by_value.py, tests/integration/test_by_value.py)
"""

import contextlib
import dis
import enum
import functools
import importlib
import io
import itertools
import linecache
import logging
import os
import pickle
import re
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .._torch.modules import python_function, reduce_script
from .buffers import PickleParts

log = logging.getLogger("aiorpc_torch")

EXTRA = "pip install 'aiorpc_torch[cloudpickle]'"

Reduce = Callable[[Any], Any]
"""The reduction of an object, or NotImplemented, as `reducer_override` returns it."""

Identity = tuple[bytes, int]
"""The process that sent an object first, and the number of the object there."""


NAMED = type, FunctionType
"""The types of objects that plain pickles hold by name."""

WRAPPERS = classmethod, staticmethod

CONSTANTS = frozenset((bool, int, float, str, bytes, type(None)))
"""Types of constants. A subclass may have an equality that raises."""

MAX_SOURCE = 256 * 1024
"""Maximum characters of a text of which code is sent with its lines."""

Use = Callable[[], Any]
"""Returns what a global had; None if that is gone."""


class NotByName(pickle.PicklingError):
    """A plain pickle of a function or class that travels by value."""


def is_by_value(obj: Any) -> bool:
    """Return whether a function or class has a name that no other process can resolve."""
    return "<" in obj.__qualname__ or (obj.__module__ == "__main__" and is_main_without_file())


def is_main_without_file() -> bool:
    """Return whether `__main__` is a notebook, a prompt, `python -c` or the standard input."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is None or file == "<stdin>"


def refuse_by_value(obj: Any, *, unless_unknown: bool = False) -> None:
    """Raise NotByName for a function or class that travels by value.

    Without `cloudpickle` a name in `__main__` is not refused: this process itself resolves it.

    With `unless_unknown`, one of `<locals>` has to have travelled before. Another process could not
    catch an exception of any other.
    """
    if not is_by_value(obj):
        return
    if "<" in obj.__qualname__:
        is_refused = not unless_unknown or _known_identity(obj) is not None
    else:
        is_refused = _cloudpickle() is not None
    if is_refused:
        raise NotByName(f"{obj.__module__}.{obj.__qualname__} cannot be pickled by name")


def _cloudpickle() -> Any:
    """Return the module, None if it is not installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


# ── to send ─────────────────────────────────────────────────────────────────────────────────────


def dump_by_value(value: Any, parts: PickleParts, reduce: Reduce, cause: NotByName) -> None:
    """Pickle `value` to `parts`, with everything by value that has no name for a peer.

    `reduce` is asked first. `cause` is the error of the plain pickle.

    Raises:
        PicklingError: if `cloudpickle` is not installed; the message names the extra. And an
            exception of any class, if the value cannot be pickled.
    """
    if (cloudpickle := _cloudpickle()) is None:
        raise pickle.PicklingError(f"{cause}; to send it by value: {EXTRA}") from None
    pickler = _pickler_class(cloudpickle)(parts, reduce)
    try:
        pickler.dump(value)
    except Exception as exc:
        with contextlib.suppress(Exception):  # a frozen exception
            exc.__suppress_context__ = True  # that its name cannot be resolved is no mistake
            for note in pickler.unsendable_globals():
                exc.add_note(note)
        raise


@functools.lru_cache(maxsize=1)
def _pickler_class(cloudpickle: Any) -> Any:
    class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
        """A pickler of cloudpickle's that sends by name what a peer can import."""

        def __init__(self, parts: PickleParts, reduce: Reduce) -> None:
            super().__init__(parts, pickle.HIGHEST_PROTOCOL, buffer_callback=parts.keeps_inside)
            self._reduce = reduce
            self._functions: list[FunctionType] = []
            # For each file of code: its name as it is read, and its text, "" for none.
            self._sources: dict[str, tuple[str, str]] = {}

        def unsendable_globals(self) -> Iterator[str]:
            """Yield for each global of a function that cannot be pickled which one it is."""
            for function in self._functions:
                names = _global_names(function.__code__) & function.__globals__.keys()
                for name in sorted(names):
                    try:
                        type(self)(PickleParts(), self._reduce).dump(function.__globals__[name])
                    except Exception:
                        what = f"{function.__qualname__} uses the global {name!r}"
                        yield f"({what}, which cannot be sent: make what it needs an argument)"

        def reducer_override(self, obj: Any) -> Any:
            own = getattr(type(obj), "__aiorpc_reduce__", None)
            if own is not None and is_by_value(obj):  # a `Batched`
                return _with_identity(obj, own(obj))
            if isinstance(obj, CodeType):
                _, parts = self.dispatch_table[CodeType](obj)
                file = obj.co_filename
                if (known := self._sources.get(file)) is None:  # a cell may have many functions
                    known = self._sources[file] = _shown(file), _source(file)
                return restore_code, (parts, *known)
            if not isinstance(obj, NAMED):
                return self._reduce(obj)
            if not is_by_value(obj) and _resolves(obj):
                return NotImplemented
            if isinstance(obj, FunctionType):
                self._functions.append(obj)
                return _with_identity(obj, super().reducer_override(obj))
            _warn_of_old_copies(obj)
            reduced = super().reducer_override(obj)
            # cloudpickle makes any class but an enum with this namespace. Without `<locals>` in its
            # `__qualname__` the copy would be sent by name.
            args: tuple[Any, ...] = reduced[1] if isinstance(reduced, tuple) else ()
            if len(args) > 3 and isinstance(args[3], dict) and not issubclass(obj, enum.Enum):
                args[3].setdefault("__qualname__", obj.__qualname__)
            return _with_identity(obj, reduced)

    return ByValuePickler


def _resolves(obj: Any, named: Any = None) -> bool:
    """Return whether it has the name of `named`, or its own, in a module that is loaded."""
    # cloudpickle sends all of `__main__` by value; with a file, peers import it.
    named = obj if named is None else named
    found: Any = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is obj


def reduce_script_function(function: Any) -> Any:
    """Return the reduction of a script function: its name, or its code if it has none."""
    original = python_function(function)
    if is_by_value(original) or not _resolves(function, original):
        return reduce_script(function)
    return find, (original.__qualname__, original.__module__)


def find(path: str, module: str) -> Any:
    """Return what has that name; import its module. Raises what importing raises."""
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _with_identity(obj: Any, reduced: Any) -> Any:
    if not isinstance(reduced, tuple) or len(reduced) < 6:
        return reduced
    make, args, state, _, _, set_state = reduced
    if (identity := _objects.identities.get(obj)) is None:
        number = next(_objects.numbers)
        identity = _objects.identities[obj] = _objects.process, number
        _objects.own[number] = obj
        _objects.complete.add(obj)
    return restore, (identity, make, args), (set_state, state), None, None, restore_state


def _warn_of_old_copies(cls: type) -> None:
    """Warn if what the methods of a class use was defined again since a peer got the class.

    A class is copied once to each peer, with the functions and classes that it uses.
    """
    uses = _uses(cls)
    before = _objects.uses.get(cls, uses)
    _objects.uses[cls] = uses  # one warning for each change
    for name, use in uses.items():
        is_new = name not in before
        if is_new or not _is_same(use(), before[name]()):
            log.warning(
                "%s was defined %safter %s, which uses it, was sent to a worker: workers that have "
                "%s %s %s. Define %s again too, or restart them",
                *(name, "" if is_new else "again ", cls.__qualname__, cls.__qualname__),
                *("have no" if is_new else "keep the old", name, cls.__qualname__),
            )


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    is_constant = type(one) is type(other) and type(one) in CONSTANTS
    return is_constant and (one == other or (one != one and other != other))  # NaN


def _uses(cls: type) -> dict[str, Use]:
    """Return the globals of a class's methods, and of what these call: what travels by value,
    constants and modules; of others None. Those that a function assigns are no constants.
    """
    found: dict[str, Use] = {}
    assigned: set[str] = set()
    seen: set[FunctionType] = set()  # a function may be its own `__wrapped__`
    waiting = [*vars(cls).values()]
    while waiting:
        function = waiting.pop()
        if isinstance(function, WRAPPERS) or hasattr(type(function), "__aiorpc_reduce__"):
            function = function.__wrapped__  # of a `Batched`
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        if not is_by_value(function):  # peers import it
            continue
        waiting.append(vars(function).get("__wrapped__"))
        assigned |= _global_names(function.__code__, "STORE_GLOBAL")
        for name in _global_names(function.__code__) & function.__globals__.keys():
            value = function.__globals__[name]
            if name in found:
                continue
            if isinstance(value, NAMED) and is_by_value(value):
                found[name] = weakref.ref(value)
                waiting.append(value)
            else:
                is_kept = type(value) in CONSTANTS or isinstance(value, ModuleType)
                found[name] = functools.partial(_constant, value if is_kept else None)
    return {name: use for name, use in found.items() if name not in assigned}


def _constant(value: Any) -> Any:
    return value


@functools.lru_cache(maxsize=4096)
def _global_names(code: CodeType, step: str = "LOAD_GLOBAL") -> frozenset[str]:
    steps = dis.get_instructions(code)
    names = {each.argval for each in steps if each.opname == step}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(names).union(*(_global_names(each, step) for each in inner))


# ── code ────────────────────────────────────────────────────────────────────────────────────────

# It keeps its place: the file, or the cell of a notebook, and its lines. cloudpickle names every
# file `<dynamic-code>`, which no traceback and no look at a running call can show.


def _source(file: str) -> str:
    """Return the text of a file that the peer cannot read, "" for others and for a long one."""
    source = "" if os.path.exists(file) else "".join(linecache.getlines(file))
    return source if len(source) <= MAX_SOURCE else ""


def _shown(file: str) -> str:
    """Return a file's name as it is read: `Cell In[5]` for that of a notebook's cell."""
    with contextlib.suppress(Exception):  # IPython is not here, or of another version
        shell = sys.modules["IPython"].get_ipython()
        if found := shell.compile.format_code_name(file):
            return " ".join(found)
    return file


def restore_code(args: tuple[Any, ...], file: str, source: str) -> CodeType:
    """Return the code, whose lines are known from now on."""
    if source:
        linecache.cache[file] = len(source), None, _lines(source), file
    return CodeType(*args).replace(co_filename=file)


@functools.lru_cache(maxsize=4)  # every function of a cell has its text
def _lines(source: str) -> list[str]:
    return [*io.StringIO(source)]  # str.splitlines() ends a line at a form feed, too


# ── received ────────────────────────────────────────────────────────────────────────────────────


class _Objects:
    """The objects of this process that travelled by value, sent or received."""

    def __init__(self) -> None:
        self.process = uuid.uuid4().bytes
        self.numbers = itertools.count()
        self.identities = weakref.WeakKeyDictionary[Any, Identity]()
        self.own = weakref.WeakValueDictionary[int, Any]()
        self.complete = weakref.WeakSet[Any]()  # own, and received classes
        self.uses = weakref.WeakKeyDictionary[type, dict[str, Use]]()  # of classes that were sent


_objects = _Objects()


def _renew() -> None:
    global _objects
    _objects = _Objects()


os.register_at_fork(after_in_child=_renew)


def is_among(function: Any, others: Iterable[Any]) -> bool:
    """Return whether one of `others` is `function`, or both are copies that came by value."""
    others = [*others]
    if any(each is function for each in others):
        return True
    known = _known_identity(function)
    return known is not None and any(_known_identity(each) == known for each in others)


def came_by_value(cls: type) -> bool:
    """Return whether a class has come by value, or would go so to others."""
    return _known_identity(cls) is not None or is_by_value(cls)


def _known_identity(obj: Any) -> Identity | None:
    try:
        return _objects.identities.get(obj)
    except TypeError:  # no weak references, or not hashable: neither function nor class
        return None


def restore(identity: Identity, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return a new object without its state, or the original if this process sent it first."""
    process, number = identity
    if process == _objects.process and (own := _objects.own.get(number)) is not None:
        return own
    made = make(*args)  # the class that arrived before, if it did
    _objects.identities[made] = identity
    return made


def restore_state(obj: Any, setter_and_state: tuple[Callable[..., Any], Any]) -> None:
    """Set the state of a new object; do nothing to an own object or a class that has its state."""
    if obj in _objects.complete:
        return
    setter, state = setter_and_state
    setter(obj, state)
    if isinstance(obj, type):
        _objects.complete.add(obj)


def explain(exc: BaseException) -> BaseException:
    """Return an error of unpickling or of a look-up, with the remedy if a name is not found."""
    if isinstance(exc, ModuleNotFoundError) and (exc.name or "").startswith("cloudpickle"):
        return ModuleNotFoundError(
            f"a function or class came by value, which needs cloudpickle here: {EXTRA}",
            name=exc.name,
        )
    # "… on <module '__main__' …>" until Python 3.13, "module '__main__' has no …" since 3.14. The
    # script of a local world's children is `__mp_main__`.
    if type(exc) is AttributeError and _OF_MAIN.search(str(exc)):
        return AttributeError(
            f"{exc}: only the other process's script has it. Put it into a module that both "
            f"processes import; if that process is a notebook or prompt, there: {EXTRA}"
        )
    if isinstance(exc, ModuleNotFoundError):
        exc.add_note("(both processes must be able to import the module: see PYTHONPATH)")
    return exc


_OF_MAIN = re.compile(r"module '__(mp_)?main__'")
