"""Errors of torch's transport, by name."""

import pytest
from torch.distributed import rpc

import aiorpc_torch as aiorpc
from aiorpc_torch._torch import rrefs
from aiorpc_torch._torch.transport import classify_error, is_own_end


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)",
            "its connection has ended: eof",
        ),
        (
            "ECONNREFUSED: connection refused (tensorpipe/transport/uv/uv.h:297)\nmore",
            "its connection has ended: connection refused",
        ),
        (
            "RPC has not been initialized. Call init_rpc first.",
            "torch's RPC has ended in its process",
        ),
        ("Something else entirely", None),
    ],
)
def test_transport_errors_by_name(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str | None
) -> None:
    """A broken pipe is a lost worker, without the file of TensorPipe; all else has its text."""
    # Whatever world this process was in before.
    monkeypatch.setattr(rrefs, "is_adopted", lambda: False)
    error = classify_error(RuntimeError(text), "ps")
    if reason is None:
        assert str(error) == f"the message to worker 'ps' failed: {text}"
        return
    assert isinstance(error, aiorpc.WorkerLost)
    assert (error.worker, error.reason) == ("ps", reason)


def test_a_connection_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the address and what to do; one of a connection that broke does not."""
    monkeypatch.setattr(rrefs, "is_adopted", lambda: False)
    refused = RuntimeError("ECONNREFUSED: connection refused (tensorpipe/transport/uv/uv.h:297)")
    assert str(classify_error(refused, "ps", "uv://10.0.0.2:39318")) == (
        "worker 'ps' is lost: no connection to uv://10.0.0.2:39318: connection refused. If it "
        "runs, give it the interface= (or AIORPC_INTERFACE) at which the others reach it, and open "
        "its ports"
    )
    broken = RuntimeError("ECONNRESET: connection reset by peer (tensorpipe/transport/uv/uv.h:297)")
    error = classify_error(broken, "ps", "uv://10.0.0.2:39318")
    assert str(error) == "worker 'ps' is lost: its connection has ended: connection reset by peer"


def test_the_end_of_torch_in_this_process() -> None:
    """Also as the owner of an RRef is asked for, once the agent is gone."""
    with pytest.raises(RuntimeError) as caught:
        rpc._get_current_rpc_agent()  # type: ignore[attr-defined]
    assert is_own_end(str(caught.value))
