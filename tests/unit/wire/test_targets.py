"""Names of methods are plain and public; each target has a name for errors."""

import pytest
from hypothesis import given, strategies as st

from aiorpc_torch._wire.targets import FetchTarget, check_public_name, function_name


@pytest.mark.promise("security.private")
@given(st.text(max_size=8))
def test_only_plain_public_names_pass(name: str) -> None:
    """Whatever else there is."""
    if name.isidentifier() and not name.startswith("_"):
        check_public_name(name)
        return
    with pytest.raises(AttributeError):
        check_public_name(name)


def test_the_name_of_a_fetch() -> None:
    """Errors and `pending` of the owner name the public function."""
    found = object()
    bound = FetchTarget((0, 1)).bind(found)
    assert function_name(bound) == "fetch"
    assert bound() is found
