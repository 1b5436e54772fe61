"""Workers in containers of podman, as the guide to Kubernetes and containers has them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.podman import NETWORK, Podman, running_podman
from tests.cluster.programs import Running, environment
from tests.cluster.steady import BACK, pids, reaching
from tests.cluster.test_manifests import PODS, job_of, manifests
from tests.support import guides
from tests.support.example_programs import free_port

STEADY = str(Path(__file__).with_name("steady.py"))
SIZE = 3

TENSORS = """\
import asyncio, os
import torch
import aiorpc_torch as aiorpc

def double(x):
    return x + x

async def main():
    async with aiorpc.worker() as me:
        (peer,) = me.peers
        for elements in (10, 1_000_000):  # beside its call, and on a way of its own
            x = torch.arange(elements)
            assert torch.equal(await aiorpc.call(peer, double, x), 2 * x)
        os.write(1, f"{me.name} is done\\n".encode())

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def podman_of_the_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """Make a network for the containers of the tests of this file."""
    with running_podman(tmp_path_factory.mktemp("podman")) as found:
        yield found


@pytest.fixture
def podman(podman_of_the_file: Podman) -> Iterator[Podman]:
    """Return a podman without containers, and leave it without containers."""
    yield podman_of_the_file
    podman_of_the_file.clear()


def exit_codes(podman: Podman, names: list[str]) -> list[int]:
    """Wait until these containers have ended, and return their exit codes."""
    return [int(each) for each in podman.do("wait", *names).split()]


@pytest.mark.promise("worlds.launchers")
def test_the_pods_of_the_manifest(podman: Podman, tmp_path: Path) -> None:
    """A container for each pod, with the variables, the names and the limits of the manifest."""
    job = job_of(manifests(PODS))
    (tmp_path / "train.py").write_text(guides.read(PODS).files["train.py"])
    names = [f"{job.name}-{index}" for index in range(job.size)]
    for index, name in enumerate(names):
        options = ["--detach", f"--name={name}", f"--hostname={name}", f"--network={NETWORK}"]
        options += [f"--network-alias={name}.{job.service}", f"--cpus={job.cpus}"]
        variables = {**job.variables, "JOB_COMPLETION_INDEX": str(index)}
        podman.do("run", *podman.new(tmp_path, *job.command, options=options, **variables))
    codes = exit_codes(podman, names)
    output = [podman.do("logs", name) for name in names]
    assert codes == [0] * job.size, output
    assert output == [f"worker{rank} of {job.size}" for rank in range(job.size)]


@pytest.mark.parametrize("network", [NETWORK, "host"])
def test_tensors_between_containers(network: str, podman: Podman, tmp_path: Path) -> None:
    """They need no /dev/shm, on a network of their own and on that of their host."""
    (tmp_path / "program.py").write_text(TENSORS)
    port = str(free_port())
    address = "127.0.0.1" if network == "host" else "first"
    names = ["first", "second"]
    for rank, name in enumerate(names):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": address}
        options = ("--detach", f"--name={name}", f"--network={network}", "--shm-size=64k")
        command = ("python", "program.py")
        words = podman.new(tmp_path, *command, options=options, MASTER_PORT=port, **variables)
        podman.do("run", *words)
    codes = exit_codes(podman, names)
    output = [podman.do("logs", name) for name in names]
    assert codes == [0, 0], output
    assert output == ["worker0 is done", "worker1 is done"]


def test_the_doctor_in_a_container(podman: Podman, tmp_path: Path) -> None:
    """It finds the interface and the launcher, and starts a world of two."""
    pod = {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "first"}
    options = ("--rm", "--name=first", f"--network={NETWORK}", "--shm-size=64k")
    command = ("python", "-m", "aiorpc_torch", "doctor")
    words = podman.new(tmp_path, *command, options=options, **pod)
    with podman.start("run", *words, cwd=tmp_path) as doctor:
        assert doctor.end() == 0, doctor.lines
        assert doctor.matching(r"ok +interface: eth0 .*"), doctor.lines
        assert doctor.matching(r"ok +launcher: .*JOB_COMPLETION_INDEX.*"), doctor.lines


@pytest.mark.promise("rejoin.machines")
@pytest.mark.parametrize("rank", [2, 0])
def test_a_container_that_is_started_again(rank: int, podman: Podman, tmp_path: Path) -> None:
    """Podman starts it again under its name; both processes of it have the same number inside."""
    names = [f"train-{index}" for index in range(SIZE)]
    log = tmp_path / "log"
    log.touch()
    pod = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": names[0]}
    for index, name in enumerate(names):
        options = ("--detach", f"--name={name}", f"--network={NETWORK}", "--restart=on-failure")
        command = ("sh", "-c", f"exec python {STEADY} >>log 2>&1")
        variables = {**pod, "JOB_COMPLETION_INDEX": str(index)}
        podman.do("run", *podman.new(tmp_path, *command, options=options, **variables))
    with Running(["tail", "-n+1", "-f", str(log)], cwd=tmp_path, env=environment()) as lines:
        now = pids(lines.wait_for(r"(\d) (\d+) entered 0", SIZE))
        for each in now:
            lines.wait_for(reaching(each, now))
        podman.host.kill(podman.pid(names[rank]))
        now |= pids(lines.wait_for(rf"({rank}) (\d+) entered \d", 2, BACK))
        for each in now:
            lines.wait_for(reaching(each, now))
        (tmp_path / "stop").touch()
        assert exit_codes(podman, names) == [0] * SIZE, lines.lines
