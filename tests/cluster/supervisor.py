"""Supervisors of processes: each process is started again at once when it ends with a failure.

They are a loop of a shell for each process, as `Restart=always` of systemd and `restartPolicy:
Always` of Kubernetes are without their pauses, and agents of torchrun.
"""

import sys
from pathlib import Path

from tests.cluster.programs import Running, environment

SIZE = 3
LOOPS = """\
size=$1; shift
for rank in $(seq 0 $((size - 1))); do
    ( export JOB_COMPLETION_INDEX=$rank WORLD_SIZE=$size
      until "$@"; do echo "rank $rank is started again"; done ) &
done
wait
"""

# Without a rendezvous that is repeated, an agent starts its own processes again, and no others.
AGENTS = """\
where="$1 $2"; shift 2
torchrun="-m torch.distributed.run --nnodes=2 --max-restarts=9 $where"
"$1" $torchrun --nproc-per-node=1 --node-rank=0 "${@:2}" &
"$1" $torchrun --nproc-per-node=2 --node-rank=1 "${@:2}" &
wait
"""


def loops(*program: str, cwd: Path, **more: str) -> Running:
    """Start three processes of a program with the variables of pods, each in a loop."""
    words = ["bash", "-c", LOOPS, "bash", str(SIZE), sys.executable, *program]
    return Running(words, cwd=cwd, env=environment(**more))


def agents(*program: str, cwd: Path, port: int) -> Running:
    """Start three processes under two agents of torchrun; the first has rank 0 alone."""
    where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    words = ["bash", "-c", AGENTS, "bash", *where, sys.executable, *program]
    return Running(words, cwd=cwd, env=environment())
