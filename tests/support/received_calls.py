"""The calls of a frame, as a callee reads them."""

from aiorpc_torch._wire.messages import Group, check_groups, read_groups


def load_calls(data: bytes) -> list[Group]:
    """Return the groups of a frame. Raise ValueError if it is malformed."""
    groups = read_groups(data)
    check_groups(groups)
    return groups
