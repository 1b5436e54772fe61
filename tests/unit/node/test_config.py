"""Arguments of a world that are of another type, before anything starts."""

from pathlib import Path
from typing import Any

import pytest

import aiorpc_torch as aiorpc

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name": ({"name": ["a"]}, r"a worker's name must be a str, got \['a'\]"),
    "a rank": ({"rank": "0"}, "rank must be an int, got '0'"),
    "a size that was divided": ({"world_size": 2.0}, "world_size must be an int, got 2.0"),
    "threads": ({"threads": 2.5}, "threads must be an int, got 2.5"),
    "a start": ({"start_timeout": "9"}, "start_timeout must be a number of seconds, got '9'"),
    "no start": ({"start_timeout": None}, "start_timeout must be a number of seconds, got None"),
    "a stop": ({"stop_timeout": "9"}, "stop_timeout must be a number of seconds or None, got '9'"),
    "a heartbeat": ({"heartbeat": None}, "heartbeat must be a number of seconds, got None"),
    "transports": ({"transports": 3}, "transports must be a list of names, got 3"),
    "channels": ({"channels": [3]}, r"channels must be a list of names, got \[3\]"),
    "a certificate": ({"tls": "cert.pem"}, "tls must be a Tls, got 'cert.pem'"),
}


@pytest.mark.parametrize("of", WRONG)
async def test_an_argument_of_another_type(of: str) -> None:
    """Its error names the argument."""
    given, expected = WRONG[of]
    valid = {"name": "w", "rank": 0, "world_size": 2, "init_method": "unix://x"}
    with pytest.raises(TypeError, match=expected):
        async with aiorpc.worker(**(valid | given)):
            pass


WORLDS: dict[str, tuple[dict[str, Any], str]] = {
    "half a worker": ({"workers": 2.5}, "workers must be a number or a list of names, got 2.5"),
    "no workers": ({"workers": None}, "workers must be a number or a list of names, got None"),
    "a list": ({"workers": [["a"]]}, r"a worker's name must be a str, got \['a'\]"),
    "max_restarts": (
        {"workers": 0, "max_restarts": "1"},
        "max_restarts must be an int, got '1'",
    ),
    "without a number": (
        {"workers": 0, "max_restarts": None},
        "max_restarts must be an int, got None",
    ),
    "fewer": ({"workers": 0, "max_restarts": -1}, "max_restarts must be at least 0, got -1"),
    "renamed": ({"workers": 0, "restart": 1}, "restart= is called max_restarts="),
    "unknown": ({"workers": 0, "restrt": 1}, "unexpected keyword argument 'restrt'$"),
}


@pytest.mark.parametrize("of", WORLDS)
async def test_a_local_world_of_another_type(of: str) -> None:
    """Before it starts a child."""
    given, expected = WORLDS[of]
    with pytest.raises((TypeError, ValueError), match=expected):
        async with aiorpc.local_world(**given):
            pass


async def test_a_place_of_another_type(tmp_path: Path) -> None:
    """A path is not a URL."""
    place: Any = tmp_path
    with pytest.raises(TypeError, match="init_method must be a str such as file:///path, got"):
        async with aiorpc.worker(rank=0, world_size=2, init_method=place):
            pass
