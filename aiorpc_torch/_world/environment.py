"""How a world is described where nobody has described it: in torchrun's environment, or for one.

Knows the names of variables, nothing of torch.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator


def number(variable: str, given: int | None) -> int:
    """What was given, or else what that variable says."""
    if given is not None:
        return given
    try:
        return int(os.environ[variable])
    except KeyError:
        raise ValueError(
            f"worker() needs {variable.lower()}=, or {variable} in the environment, "
            "where torchrun puts it"
        ) from None


def all_are_here(init_method: str | None, world_size: int) -> bool:
    """Whether it is known that every worker is on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun's, for the world that it describes
    return init_method is None and (world_size == 1 or local == str(world_size))


@contextlib.contextmanager
def meeting_place(init_method: str | None, world_size: int) -> Iterator[str]:
    """Where the workers of a world meet, while the block lasts, as torch's `init_method`."""
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
