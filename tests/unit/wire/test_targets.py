"""Only plain public names are names of methods."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._wire.targets import check_public_name


@pytest.mark.promise("security.private")
@given(st.text(max_size=8))
def test_only_plain_public_names_pass(name: str) -> None:
    """Whatever else there is."""
    if name.isidentifier() and not name.startswith("_"):
        check_public_name(name)
        return
    with pytest.raises(AttributeError):
        check_public_name(name)
