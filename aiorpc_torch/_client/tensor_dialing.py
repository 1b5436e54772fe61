"""Connecting sockets for tensors by TLS, in a thread. (tests/network/test_one_port.py)"""

import asyncio
import socket
import threading

from .._aio.threads import run_in_thread
from .._port.dialer import Dialer, receive_exactly
from .._wire.handshake import (
    NONCE,
    PROOF,
    Credentials,
    encode_hello,
    is_callee_proven,
    new_nonce,
)


async def dial_in_thread(
    dialer: Dialer, address: tuple[str, int], credentials: Credentials, number: int, timeout: float
) -> socket.socket:
    """Return a proven socket, with TLS. `number` is that of its hello.

    Raises:
        TlsError: if one end refuses the other's certificate.
        OSError: if there is no connection, or no proof within `timeout`.
    """
    is_abandoned = threading.Event()

    def work() -> socket.socket:
        found = dialer.tensor_socket(address, timeout)
        try:
            _prove(found, credentials, number)
            if is_abandoned.is_set():
                raise ConnectionAbortedError("it is not wanted any more")
        except BaseException:
            found.close()
            raise
        return found

    try:
        return await run_in_thread(work, "aiorpc-connect")
    except asyncio.CancelledError:
        is_abandoned.set()
        raise


def _prove(sock: socket.socket, credentials: Credentials, number: int) -> None:
    theirs, mine = receive_exactly(sock, NONCE), new_nonce()
    sock.sendall(encode_hello(credentials, number, theirs, mine))
    proof = receive_exactly(sock, PROOF)
    if not is_callee_proven(credentials, number, theirs, mine, proof):
        raise ConnectionError("the listener did not prove the secret")
