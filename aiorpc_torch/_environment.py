"""What the environment says of a world, and says to torch: rank, size, meeting place, interface."""

import contextlib
import os
import tempfile
from collections.abc import Iterator


def number_from(variable: str, given: int | None) -> int:
    """What is given, or else what that variable says."""
    if given is not None:
        return given
    try:
        return int(os.environ[variable])
    except KeyError:
        raise ValueError(
            f"worker() needs {variable.lower()}=, or {variable} in the environment, "
            "where torchrun puts it"
        ) from None


@contextlib.contextmanager
def meeting_place(init_method: str | None, world_size: int) -> Iterator[str]:
    """Where a world meets: as given, or as the environment says; one alone needs no place."""
    if init_method is not None:
        yield init_method
    elif world_size == 1:
        with new_meeting_place() as where:
            yield where
    else:
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ValueError(
                f"worker() needs init_method=, or {' and '.join(missing)} in the environment"
            )
        yield "env://"


@contextlib.contextmanager
def new_meeting_place() -> Iterator[str]:
    """A file store's address for a new world on this machine: no port is opened for it."""
    with tempfile.TemporaryDirectory(prefix="aiorpc-", ignore_cleanup_errors=True) as folder:
        yield f"file://{folder}/store"


@contextlib.contextmanager
def loopback() -> Iterator[None]:
    """Let gloo and TensorPipe bind to the loopback interface only, unless told otherwise."""
    names = [name for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if name not in os.environ]
    interface = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
    os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
