"""What do handshakes of strangers without a certificate cost a worker's event loop and memory?

They connect to the one port of a worker with `tls=`, ask for calls, and take part in the handshake
up to the certificate that they do not have. A member connects meanwhile, again and again.

    python -m benchmarks.strangers_tls [--count N] [--rates R,R] [--purpose NAME]
"""

import argparse
import asyncio
import contextlib
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from aiorpc_torch._port.port import Port
from aiorpc_torch._port.purposes import CALLS, server_name
from aiorpc_torch._port.tls import Tls
from aiorpc_torch._server.listener import Listener
from aiorpc_torch._wire.handshake import NONCE, Party
from tests.support.certificates import Authority

from ._compare import lay_out, machine
from ._lag import Ticker
from ._peers_process import process
from ._process import resident_memory

RATES = "0,200,2000"  # strangers in a second
COUNT = 1_000  # strangers of a rate
IDLE = 5.0  # seconds without any
AT_ONCE = 64  # strangers of the flood
HOST = "127.0.0.1"


def strangers(told: Connection, address: tuple[str, int], rate: float, name: str) -> None:
    """Tell that this process is here; once told so connect, `rate` times a second; tell the end."""
    told.send("here")
    count = told.recv()
    asyncio.run(_strangers(address, rate, count, name))
    told.send("done")


async def _strangers(address: tuple[str, int], rate: float, count: int, name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    places = asyncio.Semaphore(AT_ONCE)

    async def visit() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                *address, ssl=context, server_hostname=name
            )
            await reader.read()
            writer.close()
        places.release()

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            await places.acquire()
            group.create_task(visit())
            await asyncio.sleep(1 / rate)


def members(told: Connection, address: tuple[str, int], files: tuple[str, str, str]) -> None:
    """Connect with a certificate until told to end; report the seconds until the first bytes."""
    tls, took = Tls(*files), []
    told.send("here")
    while not told.poll(0.05):
        begin = time.perf_counter()
        with contextlib.suppress(OSError), socket.create_connection(address, 10) as raw:
            with tls.client.wrap_socket(raw, server_hostname=server_name(CALLS)) as secured:
                assert len(secured.recv(NONCE)) == NONCE
                took.append(time.perf_counter() - begin)
    told.send(took)


class Found(NamedTuple):
    """The figures of one rate."""

    rate: float
    lags: list[float]
    cpu: float  # seconds of the loop's thread
    memory: int
    members: list[float]


async def measure(port: Port, rate: float, given: argparse.Namespace, files: Any) -> Found:
    address = (port.host, port.number)
    with (
        process(strangers, address, rate, server_name(given.purpose)) as many,
        process(members, address, files) as few,
    ):
        await asyncio.to_thread(many.recv)
        await asyncio.to_thread(few.recv)
        async with Ticker() as ticker:
            begin, cpu = time.perf_counter(), time.thread_time()
            if rate:
                many.send(given.count)
                await asyncio.to_thread(many.recv)
            else:
                await asyncio.sleep(IDLE)
            cpu = time.thread_time() - cpu
            seconds = time.perf_counter() - begin
        few.send(None)
        took = await asyncio.to_thread(few.recv)
    rate = given.count / seconds if rate else 0.0
    return Found(rate, ticker.lags, cpu / seconds, resident_memory(os.getpid()), took)


@contextlib.contextmanager
def port_of(tls: Tls) -> Iterator[Port]:
    with contextlib.closing(Port(HOST, 0, tls)) as port:
        yield port


async def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = Authority(Path(folder)).files()
        with port_of(Tls(*files)) as port:
            refuse: Any = None
            listener = Listener(Party("w0", 0), HOST, refuse, refuse, port)
            rows = []
            for rate in map(float, given.rates.split(",")):
                found = await measure(port, rate, given, files)
                mine = sorted(found.members)
                rows.append(
                    (
                        f"{found.rate:,.0f}",
                        f"{100 * found.cpu:.0f}",
                        f"{median(found.lags):.2f}",
                        f"{quantiles(found.lags, n=100)[98]:.2f}",
                        f"{max(found.lags):.1f}",
                        f"{found.memory / 1e6:.0f}",
                        f"{len(mine)}",
                        f"{1e3 * median(mine):.1f}" if mine else "-",
                        f"{1e3 * mine[-1]:.0f}" if mine else "-",
                    )
                )
            listener.close()
    heads = ("strangers/s", "CPU of the loop %", "lag ms: median", "99 %", "longest", "memory MB")
    lay_out([(*heads, "member's connections", "median ms", "longest"), *rows])
    print(f"\n{machine()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=COUNT, metavar="N", help="strangers of a rate")
    parser.add_argument("--rates", default=RATES, metavar="R,R", help="strangers in a second")
    parser.add_argument("--purpose", default=CALLS, metavar="NAME", help="what they ask for")
    asyncio.run(main(parser.parse_args()))
