"""The export policy: targets made by hand are refused, and nothing that they name is looked at."""

import sys
from typing import Any

import pytest

from aiorpc_torch import NotExported
from aiorpc_torch._server.exports import ExportPolicy
from aiorpc_torch._wire.pickling import pack
from aiorpc_torch._wire.targets import BoundTarget, CreateTarget, FunctionTarget, MethodTarget
from aiorpc_torch._wire.wire_targets import (
    BOUND,
    CREATE,
    FUNCTION,
    NamedTarget,
    encode_target,
)
from tests.support.exported_shop import Shop, price, ran


@pytest.fixture(autouse=True)
def _nothing_ran() -> Any:
    ran.clear()
    yield
    assert not ran


SHOP = "tests.support.exported_shop"
HOSTILE = {
    "system": NamedTarget(FUNCTION, None, "system", "os"),
    "through a module that is exported": NamedTarget(FUNCTION, None, "os.system", SHOP),
    "bound, in a module that is not loaded": NamedTarget(BOUND, (0, 3), "s", "this"),
    "a class to be made": NamedTarget(CREATE, None, "os.popen", SHOP),
    "a module": NamedTarget(FUNCTION, None, "os", SHOP),
    "a module that is not loaded": NamedTarget(FUNCTION, None, "s", "this"),
    "the attribute of a function": NamedTarget(FUNCTION, None, "price.__globals__", SHOP),
    "a private name": NamedTarget(FUNCTION, None, "Shop._private", SHOP),
    "no name at all": NamedTarget(FUNCTION, None),
    "a name without a module": NamedTarget(FUNCTION, None, "price"),
    "dots": NamedTarget(FUNCTION, None, "...", SHOP),
    "a name that is no text": NamedTarget(FUNCTION, None, "\x00", "\x00"),
    "a pickle": pack(FunctionTarget(price)).data,
    "bytes": b"hello",
}


@pytest.mark.promise("security.exports_unread")
@pytest.mark.parametrize("what", HOSTILE)
def test_a_target_made_by_hand(what: str) -> None:
    """A hostile target is refused; reading it runs, imports and changes nothing."""
    exports = ExportPolicy([price, SHOP], "ps")
    with pytest.raises(NotExported):
        exports.load_target(HOSTILE[what], ())
    assert "this" not in sys.modules
    target = MethodTarget((0, 3), "m")
    assert exports.load_target(NamedTarget("method", (0, 3), "m"), ()) == target


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
    """`load_target` returns the target that was sent."""
    exports = ExportPolicy([price, Shop], "ps")
    sent = encode_target(target, target.on)
    assert isinstance(sent, NamedTarget)
    assert exports.load_target(sent, ()) == target
