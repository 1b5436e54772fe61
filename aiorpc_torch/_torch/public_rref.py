"""`aiorpc_torch.RRef`: the type of every RRef, and the constructor of those of own objects."""

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .compat import RRef as TorchRRef, RRefBase, make_rref

T = TypeVar("T")


class _RRefType(type(RRefBase)):  # type: ignore[misc]  # pybind11's metaclass
    def __call__(cls, value: Any, type_hint: Any = None) -> Any:
        return make_rref(value) if type_hint is None else TorchRRef(value, type_hint)

    def __instancecheck__(cls, obj: Any) -> bool:
        return isinstance(obj, RRefBase)  # those that torch has unpickled are not of `rpc.RRef`


if TYPE_CHECKING:
    from .compat import RRef as RRef
else:

    class RRef(TorchRRef, Generic[T], metaclass=_RRefType):
        """A reference to an object of any worker, which holds the object: torch's `rpc.RRef`.

        `RRef(x)` makes one of an object of this worker: a `torch.distributed.rpc.RRef`. The object
        stays itself, whatever it is, while torch's own constructor converts values such as lists,
        dicts and tuples. `isinstance` takes every RRef, also one that another worker has made.

        Args:
            value: any object of this worker.
            type_hint: as for torch's class, which then makes the RRef of a script module for
                TorchScript (default: None).
        """
