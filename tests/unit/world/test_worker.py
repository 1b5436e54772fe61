"""How a worker serves until a peer has left, and what it tells of what ends its block."""

import asyncio
import traceback

import pytest

from aiorpc_torch import WorkerLost
from aiorpc_torch._node.config import NodeConfig
from aiorpc_torch._node.node import Node
from aiorpc_torch._peers.peers import Event, Peers
from aiorpc_torch._torch.agent import PeerInfo
from aiorpc_torch._world.shutdown import describe_failure, summary_of
from aiorpc_torch.types import Worker


def worker(event: Event, error: WorkerLost | None = None) -> Worker:
    """Worker a, whose peer b has told this as it left."""
    members = Peers("a", [PeerInfo("a", 0, 0, ""), PeerInfo("b", 1, 1, "")])
    members.apply(members.peers["b"], event, error)
    return Worker._of(Node(members, NodeConfig()))


async def test_serve_returns_when_the_peer_has_left() -> None:
    """In order."""
    await worker(Event.LEAVE).serve("b")


async def test_a_peer_that_failed_is_lost() -> None:
    """The error has its reason."""
    failure = WorkerLost("b", "its block raised ValueError: x")
    with pytest.raises(WorkerLost, match=r"'b' is lost: its block raised ValueError: x$"):
        await worker(Event.FAILURE, failure).serve("b")


def test_an_exception_that_cannot_be_shown() -> None:
    error = SyntaxError("odd", ("file.py", 1, 1, 3))
    with pytest.raises(AttributeError):
        traceback.format_exception(error)
    assert describe_failure(error) == "its block raised SyntaxError, which cannot be shown"


def test_what_ends_a_program() -> None:
    """SystemExit and Ctrl-C are named; a cancellation has no cause that could be."""
    assert describe_failure(SystemExit(3)) == "its block was ended by SystemExit: 3"
    assert describe_failure(KeyboardInterrupt()) == "its block was ended by KeyboardInterrupt"
    assert describe_failure(asyncio.CancelledError()) == "its block was cancelled"


def test_the_summary_of_an_exception() -> None:
    """Its class and text, whatever its notes are; of a group, those of the first one too."""
    error = ValueError("bad shape")
    error.add_note("(a note\nof two lines)")
    assert summary_of(error) == "ValueError: bad shape"
    group = ExceptionGroup("of tasks", [error, KeyError("x")])
    assert summary_of(group) == (
        "ExceptionGroup: of tasks (2 sub-exceptions): ValueError: bad shape"
    )
    group = ExceptionGroup("of tasks", [RuntimeError("two\nlines")])
    assert summary_of(group) == "ExceptionGroup: of tasks (1 sub-exception): RuntimeError: two"
