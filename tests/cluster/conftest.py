"""Fixtures of real launchers. Each is started once for a file, and ends with it."""

from collections.abc import Iterator

import pytest

from tests.cluster.hosts import Host, two_hosts
from tests.cluster.slurm import Slurm, running_slurm


@pytest.fixture(scope="module")
def slurm_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start Slurm for the tests of a file."""
    with running_slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def slurm(slurm_of_the_file: Slurm) -> Iterator[Slurm]:
    """Return a Slurm without jobs, and leave it without jobs."""
    yield slurm_of_the_file
    slurm_of_the_file.clear()


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Make two hosts for a test, without Slurm."""
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found
