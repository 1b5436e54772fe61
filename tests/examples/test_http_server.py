"""The HTTP front as a user runs it: a rolling restart and a drain lose no request."""

import asyncio
import re
import signal
import threading
import urllib.request

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from aiorpc_torch import CallTimeout
from examples import http_server
from tests.support.example_programs import command, run, started, until, workers_of

pytestmark = [pytest.mark.worlds, pytest.mark.slow]


def test_a_rolling_restart() -> None:
    """Every request meanwhile has an answer."""
    printed = run("http_server", "--demo", "--port", "0", python=())
    assert "model0 was restarted\nmodel1 was restarted\n" in printed
    found = re.search(r"^(\d+) requests meanwhile, statuses \{200\}$", printed, re.MULTILINE)
    assert found is not None, printed
    assert int(found[1]) > 32
    assert printed.endswith("letters: 20\na bad request: 400\n")


def test_it_answers_what_it_has() -> None:
    """A stream that has begun ends after SIGTERM; SIGHUP replaces the processes before."""
    with started(command("http_server", "--port", "0", "--timeout", "60")) as server:
        address = until(server, "serving at").split()[-1]
        before = {each.pid for each in workers_of(server)}
        server.send_signal(signal.SIGHUP)
        until(server, "model1 was restarted")
        assert not before & {each.pid for each in workers_of(server)}
        with urllib.request.urlopen(f"{address}/generate?length=2000", timeout=60) as answer:
            first = answer.read(1)
            stopping = threading.Timer(0, server.send_signal, (signal.SIGTERM,))
            stopping.start()
            assert len(first + answer.read()) == 2000
        _, errors = server.communicate(timeout=60)
        assert "Traceback" not in errors, errors


def test_a_model_that_dies_and_clients_that_leave() -> None:
    """No request fails, the model is made again, and a client that leaves is no error."""
    with started(command("http_server", "--port", "0", "--timeout", "60")) as server:
        address = until(server, "serving at").split()[-1]
        asked = urllib.request.Request(f"{address}/infer", b'{"x": [1, 2, 3, 4]}')
        workers_of(server)[0].kill()
        for _ in range(30):
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.status == 200
        for _ in range(5):
            with urllib.request.urlopen(f"{address}/generate?length=100000", timeout=60) as answer:
                assert answer.read(1)
        server.send_signal(signal.SIGHUP)
        until(server, "model1 was restarted")
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=60)
    assert "Traceback" not in errors, errors


def test_a_timeout_tells_the_client_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def late(_: web.Request) -> web.StreamResponse:
        raise CallTimeout("infer timed out, at models.py:27 in Model.infer")

    async def answer() -> None:
        await http_server.errors_as_statuses(make_mocked_request("GET", "/infer"), late)

    with pytest.raises(web.HTTPGatewayTimeout) as raised:
        asyncio.run(answer())
    assert raised.value.text == "504: Gateway Timeout"
    assert "models.py:27" in caplog.text
