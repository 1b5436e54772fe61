"""The export policy: pickles made by hand are refused before anything of them is executed."""

import pickle
import sys
from typing import Any

import pytest

from aiorpc_torch import NotExported
from aiorpc_torch._protocol.pickling import pack
from aiorpc_torch._protocol.targets import BoundTarget, CreateTarget, FunctionTarget, MethodTarget
from aiorpc_torch._server.exports import ExportPolicy
from tests.support.exported_shop import Shop, price, ran


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    ran.clear()
    yield
    assert not ran


# ── pickles made by hand ────────────────────────────────────────────────────────────────────────


def written(*parts: Any) -> bytes:
    """Return a pickle made of opcodes and of short strings."""
    short = pickle.SHORT_BINUNICODE
    texts = (
        short + bytes([len(part)]) + part.encode() if isinstance(part, str) else part
        for part in parts
    )
    return b"\x80\x05" + b"".join(texts) + pickle.STOP


def name(module: str, qualname: str) -> tuple[Any, ...]:
    return module, qualname, pickle.STACK_GLOBAL


SHOP = "tests.support.exported_shop"
WIRE = "aiorpc_torch._protocol.targets"
PICKLING = "aiorpc_torch._protocol.pickling"
FUNCTION = name(WIRE, "FunctionTarget")
ONE = pickle.TUPLE1 + pickle.NEWOBJ
HOSTILE = {
    "system": (*FUNCTION, *name("os", "system"), ONE),
    "through a module that is exported": (
        *FUNCTION,
        *name(SHOP, "os.system"),
        ONE,
    ),
    "by getattr": (
        *FUNCTION,
        *name("builtins", "getattr"),
        *name(SHOP, "os"),
        "system",
        pickle.TUPLE2 + pickle.REDUCE + ONE,
    ),
    "called while it is read": (
        *FUNCTION,
        *name(SHOP, "other"),
        pickle.EMPTY_TUPLE + pickle.REDUCE + ONE,
    ),
    "an attribute set": (
        *FUNCTION,
        *name(SHOP, "price"),
        pickle.NONE + pickle.EMPTY_DICT,
        "__name__",
        "hacked",
        pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD + ONE,
    ),
    "our own class changed": (
        *name(WIRE, "MethodTarget"),
        pickle.NONE + pickle.EMPTY_DICT,
        "kind",
        pickle.NONE + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD,
    ),
    "our own function changed": (
        *name(PICKLING, "read_rref"),
        pickle.EMPTY_DICT,
        "hacked",
        pickle.NONE + pickle.SETITEM + pickle.BUILD,
    ),
    "a module that is not loaded": (*FUNCTION, *name("this", "s"), ONE),
    "no name at all": (pickle.NONE,),
    "a number": (*FUNCTION, pickle.BININT1 + b"\x05", ONE),
    "nothing": (),
    "an extension": (*FUNCTION, pickle.EXT1 + b"\x05", ONE),
    "a persistent id": (pickle.NONE + pickle.BINPERSID,),
    "another word of ours": (*name(PICKLING, "PickledValue"), pickle.EMPTY_TUPLE + pickle.NEWOBJ),
    "an object named by a number": (
        *name(WIRE, "MethodTarget"),
        pickle.BININT1 + b"\x05",
        "m",
        pickle.TUPLE2 + pickle.NEWOBJ,
    ),
    "deep": (pickle.EMPTY_LIST + pickle.TUPLE1 * 10_000,),
}


@pytest.mark.promise("security.exports_unread")
@pytest.mark.parametrize("what", HOSTILE)
def test_a_target_made_by_hand(what: str) -> None:
    """A hostile target is refused; reading it runs, imports and changes nothing."""
    exports = ExportPolicy([price, SHOP])
    before = {"this" in sys.modules, price.__name__, MethodTarget.bind}
    with pytest.raises(NotExported):
        exports.load_target(written(*HOSTILE[what]), ())
    assert before == {"this" in sys.modules, price.__name__, MethodTarget.bind}
    assert not hasattr(sys.modules[PICKLING].read_rref, "hacked")
    target = MethodTarget((0, 3), "m")
    assert exports.load_target(pack(target).data, ()) == target


@pytest.mark.parametrize(
    "target",
    [
        FunctionTarget(price),
        CreateTarget(Shop),
        BoundTarget((0, 3), Shop.buy),
        MethodTarget((0, 3), "buy"),
    ],
)
def test_what_is_read_is_what_was_packed(target: Any) -> None:
    """`load_target` returns the target that was pickled."""
    exports = ExportPolicy([price, Shop])
    packed = pack(target)
    assert exports.load_target(packed.data, packed.tensors) == target
