"""A name server that never answers: the start of a worker, its error and its end."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.support.network_namespaces import HERE, Machine, running, why_not
from tests.support.slack import SLACK

# A name server that takes questions, and the files of the resolver that name it.
SILENT = """
import socket, sys
taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
taken.bind(("127.0.0.1", 53))
print('["serves", null]', flush=True)
sys.stdin.read()
"""
FILES = {
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n",
    "nsswitch.conf": "hosts: files dns\n",
}


@pytest.mark.promise("worlds.place")
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_silent_name_server(tmp_path: Path, rank: int) -> None:
    """The error names the name, of rank 0 or of this machine, and the process ends."""
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    mounts = ""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        mounts += f"mount --bind {tmp_path / name} /etc/{name} && "
    attempts = [
        {"init_method": "tcp://node1.example:29500"},
        {"init_method": "tcp://node1.example:29500", "port": 29600},
    ]
    attempts = [{"world_size": 2, "start_timeout": 1.0} | each for each in attempts]
    script = [str(HERE / "network_scenarios.py"), "starts", str(rank)]
    with contextlib.closing(Machine("one")) as machine:
        async with running(machine, "-c", SILENT) as server:
            await server.hears("serves")
            machine.prefix = ("unshare", "--mount", "sh", "-c", f'{mounts}exec "$@"', "sh")
            async with running(machine, *script, json.dumps({"attempts": attempts})) as node:
                for _ in attempts:
                    await node.hears("starts")
                    node.tell()
                    kind, text, seconds = await node.hears("failed")
                    assert kind == "WorldTimeout"
                    assert "the lookup of the name 'node1.example' does not end" in text
                    assert seconds < 3.0 + SLACK
                code, errors = await node.end()
                assert code == 0, errors
