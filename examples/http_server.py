"""An HTTP front for models on several workers: batches, streams, deadlines, drain, rolling restart.

`python -m examples.http_server` serves until SIGTERM or Ctrl-C, and then answers what it has. On
SIGHUP it restarts the workers one after another; none of the requests fails. `--demo` sends it
requests, and restarts the workers meanwhile.

    curl -d '{"x": [0.1, 0.2, 0.3, 0.4]}' localhost:8080/infer
    curl 'localhost:8080/generate?length=20'
"""

import argparse
import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import torch
from aiohttp import ClientSession, web
from torch import Tensor, nn

import aiorpc_torch as aiorpc

LETTERS = "abcdefgh "

log = logging.getLogger(__name__)

Restart = Callable[[], Coroutine[Any, Any, None]]


class Model:
    """A classifier, and a generator of letters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3), nn.Softmax(-1))
        self.next = torch.rand(len(LETTERS), len(LETTERS))

    @aiorpc.batched(max_size=32, max_wait=0.002, max_pending=256, stack=True, pad_to=(1, 8, 32))
    def infer(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.net(x)  # type: ignore[no-any-return]

    @aiorpc.batched(max_size=32, max_concurrent_batches=4)
    async def generate(self, lengths: list[int]) -> AsyncIterator[list[str | StopAsyncIteration]]:
        letters = torch.zeros(len(lengths), dtype=torch.long)
        for step in range(max(lengths)):
            letters = torch.multinomial(self.next[letters], 1)[:, 0]
            pairs = zip(letters, lengths, strict=True)
            yield [LETTERS[at] if step < length else StopAsyncIteration() for at, length in pairs]
            await asyncio.sleep(0.001)


def load() -> Model:
    """Load the model of this worker. From then on it gets requests."""
    aiorpc.register("model", model := Model())
    return model


class Front:
    """The handlers of the requests. Each request goes to the least busy model."""

    def __init__(self, models: aiorpc.types.NamedMembers[Model], timeout: float) -> None:
        self.models = models
        self.timeout = timeout

    def app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_statuses])
        app.add_routes([web.post("/infer", self.infer), web.get("/generate", self.generate)])
        return app

    async def infer(self, request: web.Request) -> web.Response:
        try:
            x = torch.tensor((await request.json())["x"], dtype=torch.float32).reshape(4)
        except (KeyError, TypeError, ValueError, RuntimeError) as exc:
            raise web.HTTPBadRequest(text="expected {'x': [four numbers]}") from exc
        with aiorpc.timeout(self.timeout):
            # Of a model whose process dies, another gets the request.
            y = await aiorpc.remote(self.models.any(), retries=1).infer(x)
        return web.json_response({"y": y.tolist()})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        length = request.query.get("length", "20")
        if not length.isdecimal():
            raise web.HTTPBadRequest(text="expected ?length=NUMBER")
        letters = aiter(aiorpc.remote(self.models.any()).generate(int(length)))
        async with asyncio.timeout(self.timeout):
            first = await anext(letters, "")  # an error so far has a status
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await response.write(first.encode())
            async for letter in letters:
                await response.write(letter.encode())
        except ConnectionResetError:  # the client has left, which ends the generator
            pass
        except aiorpc.RpcError:  # a second response, of a status, would leave the client waiting
            assert request.transport is not None
            request.transport.abort()
        return response


@web.middleware
async def errors_as_statuses(request: web.Request, handler: Any) -> web.StreamResponse:
    """Answer with a status that says whether to try again."""
    try:
        return await handler(request)  # type: ignore[no-any-return]
    except TimeoutError as exc:
        log.warning("%s: %s", request.path, exc)  # not for clients: it has lines of this program
        raise web.HTTPGatewayTimeout from exc
    except (aiorpc.QueueFull, aiorpc.NoMembers, aiorpc.WorkerGone) as exc:
        headers = {"Retry-After": "1"}
        raise web.HTTPServiceUnavailable(text=str(exc), headers=headers) from exc


async def restart(
    me: aiorpc.types.LocalWorker, models: aiorpc.types.NamedMembers[Model], names: list[str]
) -> None:
    """Replace the processes of the models one after another, for a new version of them, say."""
    await models.wait(len(names))  # one that has died just now is made again first
    for name in names:
        await me.stop(name)  # it ends its calls; new ones go to the others
        await me.start(name)
        await models.wait(len(names))  # it is loaded, and known here
        print(f"{name} was restarted", flush=True)


async def serve(given: argparse.Namespace) -> None:
    names = [f"model{n}" for n in range(given.workers)]
    async with aiorpc.local_world(names, name="front", max_restarts=100) as me:
        # While it is kept, each process that comes later gets a model too.
        _supervised = await aiorpc.supervised(names, load)
        models = aiorpc.members("model")
        await models.wait(len(names))
        app, wait = Front(models, given.timeout).app(), given.timeout
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=wait)
        await runner.setup()
        try:
            await web.TCPSite(runner, given.host, given.port).start()
            address = f"http://{given.host}:{runner.addresses[0][1]}"
            restarting = partial(restart, me, models, names)
            if given.demo:
                await demo(address, restarting)
            else:
                await until_told(address, restarting)
        finally:
            await runner.cleanup()  # answers what it has


async def until_told(address: str, restart: Restart) -> None:
    """Serve until SIGTERM or Ctrl-C, which cancel this; restart the models on each SIGHUP."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    print(f"serving at {address}", flush=True)
    while True:
        await asked.wait()
        asked.clear()
        await restart()


async def demo(address: str, restart: Restart) -> None:
    """Send requests while the models are restarted."""
    async with ClientSession(address) as session:

        async def ask() -> int:
            async with session.post("/infer", json={"x": [0.1, 0.2, 0.3, 0.4]}) as answer:
                return answer.status

        async def ask_on() -> list[int]:
            found = []
            while not restarting.done():
                found.append(await ask())
            return found

        restarting = asyncio.ensure_future(restart())
        asked = await asyncio.gather(*(ask_on() for _ in range(32)))
        statuses = {status for each in asked for status in each}
        print(f"{sum(map(len, asked))} requests meanwhile, statuses {statuses}")
        async with session.get("/generate", params={"length": 20}) as answer:
            print("letters:", len(await answer.text()))
        async with session.post("/infer", json={"x": "no numbers"}) as answer:
            print("a bad request:", answer.status)


def main(given: argparse.Namespace) -> None:
    # The other programs end at once at Ctrl-C (`examples/__init__.py`), and this one in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(serve(given))


def parse(*args: str) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description="Serve models over HTTP.")
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8080, help="0: any that is free")
    add("--workers", type=int, default=2)
    add("--timeout", type=float, default=5.0, help="seconds for a request")
    add("--demo", action="store_true", help="send requests, and restart the workers meanwhile")
    return parser.parse_args(args or None)


if __name__ == "__main__":
    main(parse())
