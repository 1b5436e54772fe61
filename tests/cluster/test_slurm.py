"""Workers that srun starts, in a real Slurm with two nodes."""

import itertools
import re
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm
from tests.cluster.steady import pids, reaching
from tests.support import guides

GUIDE = guides.DOCS / "guides" / "slurm-and-containers.md"
WEEK = guides.DOCS / "guides" / "week.md"
STEADY = Path(__file__).with_name("steady.py")
ALLOCATION = ("salloc", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1")

CALLS = """\
import asyncio, os, socket
import aiorpc_torch as aiorpc

def task():
    return int(os.environ["SLURM_PROCID"]), socket.gethostname()

async def main():
    async with aiorpc.worker() as me:
        found = await asyncio.gather(*(aiorpc.call(peer, task) for peer in me.peers))
        words = [f"{rank}@{host}" for rank, host in sorted([*found, task()])]
        os.write(1, f"{me.name} of {me.world_size}: {' '.join(words)}\\n".encode())

if __name__ == "__main__":
    asyncio.run(main())
"""

LOSS = """\
import asyncio, os, socket
import aiorpc_torch as aiorpc

LOST = "worker2"

async def main():
    async with aiorpc.worker() as me:
        os.write(1, f"{me.name} {socket.gethostname()} {os.getpid()}\\n".encode())
        if me.name == LOST:
            await me.serve()
        try:
            await aiorpc.call(LOST, asyncio.sleep, 600)
        except aiorpc.WorkerLost as lost:
            others = [peer for peer in me.peers if peer != LOST]
            pids = await asyncio.gather(*(aiorpc.call(peer, os.getpid) for peer in others))
            os.write(1, f"{me.name} has lost {lost.worker}, calls {len(pids)}\\n".encode())

if __name__ == "__main__":
    asyncio.run(main())
"""

CANCELLED = """\
import asyncio, os
import aiorpc_torch as aiorpc

async def main():
    async with aiorpc.worker() as me:
        os.write(1, f"{me.name} is ready\\n".encode())
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(1.0)  # what a checkpoint takes
            os.write(1, f"{me.name} has saved\\n".encode())

if __name__ == "__main__":
    asyncio.run(main())
"""


SCRIPT, LOOP, TORCHRUN = "# job.sbatch", "until python", "scontrol show"


def block_of_the_guide(text: str, page: Path = GUIDE) -> str:
    """Return the block of the page that has this text."""
    (found,) = [block for *_, block in guides.BLOCK.findall(page.read_text()) if text in block]
    return str(found)


def write(folder: Path, **files: str) -> None:
    """Write files, with one underscore in place of each dot."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def rows(found: list[re.Match[str]]) -> list[tuple[str, ...]]:
    """Return the groups of each match."""
    return [each.groups() for each in found]


def batch(slurm: Slurm, folder: Path, script: str, *options: str) -> tuple[int, list[str]]:
    """Run a batch script to its end; return its exit code and the lines of its output."""
    write(folder, job_sbatch=script)
    output = folder / "output"
    command = ("sbatch", "--parsable", f"--output={output}", *options, "job.sbatch")
    with slurm.start(*command, cwd=folder) as submitted:
        assert submitted.end() == 0, submitted.lines
    code = slurm.exit_code(submitted.lines[0])
    return code, output.read_text().splitlines()


@pytest.mark.promise("worlds.launchers")
def test_tasks_of_a_step_call_each_other(slurm: Slurm, tmp_path: Path) -> None:
    """Each task has the rank that Slurm gave it, on either node."""
    write(tmp_path, program_py=CALLS)
    with slurm.start("srun", "-N2", "-n4", "python", "program.py", cwd=tmp_path) as step:
        assert step.end() == 0, step.lines
        lines = sorted(step.lines)
    all_tasks = re.fullmatch(r"worker0 of 4: (0@node0 .* 3@node1)", lines[0])
    assert all_tasks, lines
    assert lines == [f"worker{rank} of 4: {all_tasks[1]}" for rank in range(4)]


@pytest.mark.promise("worlds.loopback")
def test_a_step_on_one_node(slurm: Slurm, tmp_path: Path) -> None:
    """Its interface is the loopback one, at which no other node reaches its tasks."""
    write(tmp_path, program_py="import logging\nlogging.basicConfig(level='INFO')\n" + CALLS)
    with slurm.start("srun", "-N1", "-n2", "python", "program.py", cwd=tmp_path) as step:
        assert step.end() == 0, step.lines
        assert len(step.matching(r"worker\d of 2: 0@(node\d) 1@\1")) == 2, step.lines
        assert len(step.matching(r".*worker\d uses lo \(127\.0\.0\.1, .*")) == 2, step.lines


def test_the_script_of_the_guide(slurm: Slurm, tmp_path: Path) -> None:
    """Its script and its program, as they are."""
    write(tmp_path, train_py=guides.read(GUIDE).files["train.py"])
    code, lines = batch(slurm, tmp_path, block_of_the_guide(SCRIPT))
    assert code == 0, lines
    assert sorted(lines) == [f"worker{rank} of 8" for rank in range(8)]


def test_torchrun_on_each_node(slurm: Slurm, tmp_path: Path) -> None:
    """The lines of the guide, behind those that ask for two nodes."""
    write(tmp_path, train_py=guides.read(GUIDE).files["train.py"])
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8")
    script = f"#!/bin/bash\n{block_of_the_guide(TORCHRUN)}"
    code, lines = batch(slurm, tmp_path, script, *options)
    assert code == 0, lines
    said = "".join(lines)  # torchrun's processes write a text and its newline apart
    assert all(said.count(f"worker{rank} of 8") == 1 for rank in range(8)), lines


def test_two_steps_at_once(slurm: Slurm, tmp_path: Path) -> None:
    """Two worlds on the same nodes have different ports."""
    write(tmp_path, program_py=CALLS)
    step = "srun --exact --nodes=2 --ntasks=2 python program.py"
    script = f"#!/bin/bash\n{step} & one=$!\n{step} & other=$!\nwait $one && wait $other\n"
    code, lines = batch(slurm, tmp_path, script, "--nodes=2", "--ntasks-per-node=2")
    assert code == 0, lines
    world = [f"worker{rank} of 2: 0@node0 1@node1" for rank in (0, 1)]
    assert sorted(lines) == sorted(world * 2)


def test_the_shell_of_a_batch_script_is_no_worker(slurm: Slurm, tmp_path: Path) -> None:
    """The error says what to start it with."""
    write(tmp_path, program_py=CALLS)
    script = "#!/bin/bash\npython program.py\n"
    code, lines = batch(slurm, tmp_path, script, "--nodes=2", "--ntasks=4")
    assert code != 0
    assert lines[-1].startswith("ValueError: worker() needs rank="), lines
    assert lines[-1].endswith("start it with srun"), lines


def test_a_local_world_in_a_batch_script(slurm: Slurm, tmp_path: Path) -> None:
    """It has nothing to do with Slurm's variables."""
    local = CALLS.replace("aiorpc.worker()", 'aiorpc.local_world(["a", "b"])')
    write(tmp_path, program_py=local.replace('os.environ["SLURM_PROCID"]', "os.getpid() > 0"))
    script = "#!/bin/bash\npython program.py\n"
    code, lines = batch(slurm, tmp_path, script, "--nodes=2", "--ntasks=4")
    assert code == 0, lines
    assert lines == ["main of 3: 1@node0 1@node0 1@node0"]


def test_the_doctor_in_each_task(slurm: Slurm, tmp_path: Path) -> None:
    """It names the launcher and the address of rank 0."""
    command = ("srun", "-N2", "-n2", "python", "-m", "aiorpc_torch", "doctor")
    with slurm.start(*command, cwd=tmp_path) as step:
        for rank in range(2):
            step.wait_for(rf"ok +launcher: RANK={rank} \(SLURM_PROCID\); .*MASTER_ADDR=node0 .*")


def test_a_task_that_is_killed(slurm: Slurm, tmp_path: Path) -> None:
    """With the option of the guide the other tasks live on, and their calls raise."""
    write(tmp_path, program_py=LOSS)
    assert "--kill-on-bad-exit=0" in block_of_the_guide(SCRIPT)
    command = ("srun", "-N2", "-n4", "--kill-on-bad-exit=0", "python", "program.py")
    with slurm.start(*command, cwd=tmp_path) as step:
        found = rows(step.wait_for(r"(worker\d) node(\d) (\d+)", 4))
        ((node, pid),) = [(int(node), int(pid)) for name, node, pid in found if name == "worker2"]
        slurm.hosts[node].kill(pid)
        lost = step.wait_for(r"(worker\d) has lost worker2, calls 2", 3)
        assert sorted(each[1] for each in lost) == ["worker0", "worker1", "worker3"]
        assert step.end() == 128 + 9, step.lines


@pytest.mark.promise("rejoin.machines")
def test_the_loop_of_the_guide(slurm: Slurm, tmp_path: Path) -> None:
    """A task that is killed twice is back twice, in the world of the others."""
    write(tmp_path, train_py=STEADY.read_text(), loop_sh=block_of_the_guide(LOOP))
    with slurm.start(*ALLOCATION, "bash", "loop.sh", cwd=tmp_path) as step:
        running = pids(step.wait_for(r"(\d) (\d+) entered 0", 4))
        for restarts in (1, 2):
            slurm.hosts[1].kill(running[3])  # the last task is on the last node
            running |= pids(step.wait_for(rf"(3) (\d+) entered {restarts}"))
            for rank in running:
                step.wait_for(reaching(rank, running))
        write(tmp_path, stop="")
        assert step.end() == 0, step.lines


@pytest.mark.promise("training.recover", "succession.takeover")
def test_the_script_of_a_week(slurm: Slurm, tmp_path: Path) -> None:
    """The learner is killed, then rank 0 and the learner: the run goes on, and ends in order."""
    script = block_of_the_guide("# week.sbatch", WEEK).replace("srun ", "srun --label ")
    script = script.replace("file:///shared", f"file://{tmp_path}")
    write(tmp_path, week_py=guides.read(WEEK).files["week.py"], week_sh=script)
    with slurm.start(*ALLOCATION, "bash", "week.sh", cwd=tmp_path) as step:
        running = pids(step.wait_for(r"(\d): process (\d+)", 4))
        for victims in ([1], [0, 1]):
            step.wait_for(r"1: step \d+", len(step.matching(r"1: step \d+")) + 10)
            entries = {rank: len(step.matching(rf"{rank}: process \d+")) for rank in victims}
            for rank in victims:
                slurm.hosts[0].kill(running[rank])
            for rank in victims:
                entered = rf"({rank}): process (\d+)"
                running |= pids(step.wait_for(entered, entries[rank] + 1))
        assert step.end() == 0, step.lines
        steps = [int(each[1]) for each in step.matching(r"1: step (\d+)")]
        assert max(steps) == 400
        assert all(later > before - 10 for before, later in itertools.pairwise(steps)), steps


@pytest.mark.parametrize("way", ["task", "loop"])
def test_a_job_that_is_cancelled(way: str, slurm: Slurm, tmp_path: Path) -> None:
    """SIGTERM comes first, as at the time limit of a job: `finally:` runs in each task, once."""
    step_of_tasks = "srun --kill-on-bad-exit=0 python train.py"
    script = block_of_the_guide(LOOP) if way == "loop" else step_of_tasks
    write(tmp_path, train_py=CANCELLED, step_sh=script)
    with slurm.start(*ALLOCATION, "bash", "step.sh", cwd=tmp_path) as step:
        step.wait_for(r"worker\d is ready", 4)
        slurm.ask("scancel", "--user=root")
        step.wait_for(r"worker\d has saved", 4)
        assert step.end() != 0
        assert len(step.matching(r"worker\d is ready")) == 4, step.lines
