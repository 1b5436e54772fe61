"""What goes wrong with messages that torch RPC sends: the one private name that such tests need."""

from typing import NoReturn

import pytest

from aiorpc_torch._client import torch_transfers


def no_memory(*_: object) -> NoReturn:
    """Fail as torch does while it makes a message."""
    raise MemoryError


def refuse_messages(patch: pytest.MonkeyPatch) -> None:
    """Let every message for torch RPC fail while it is made."""
    patch.setattr(torch_transfers, "message_for_torch", no_memory)
