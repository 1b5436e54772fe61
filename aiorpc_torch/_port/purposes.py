"""Purposes of connections to a worker's one port, as their first bytes tell them.

With TLS it is the server name in the client's first message, which is read before any handshake:
so the socket goes to the event loop that does the handshake, and to no other. Without TLS eight
bytes tell it. (tests/unit/port/test_purposes.py)
"""

import ssl

TORCH, CALLS, TENSORS, DIRECTORY = "torch", "calls", "tensors", "directory"
PURPOSES = (TORCH, CALLS, TENSORS, DIRECTORY)
"""torch's RPC; calls and small values; tensors, where TLS is used; rank 0's directory."""

_PREFACE = b"aiorpc1"

PREFACE = len(_PREFACE) + 1
"""Bytes of a preface."""

MAX_FIRST = 8192
"""Bytes of the first message of TLS, at most."""


def preface(purpose: str) -> bytes:
    """Return the first bytes of a connection without TLS."""
    return _PREFACE + b"%d" % PURPOSES.index(purpose)


def read_preface(data: bytes) -> str | None:
    """Return the purpose that the first bytes tell, None if there are too few.

    Raises:
        ValueError: if another program has sent them.
    """
    start, last = data[: len(_PREFACE)], data[len(_PREFACE) : PREFACE]
    if not _PREFACE.startswith(start) or (last and last not in b"0123"):
        raise ValueError("it is no worker without TLS")
    return PURPOSES[int(last)] if last else None


def server_name(purpose: str) -> str:
    """Return the name by which a client of TLS asks for a purpose."""
    return f"{purpose}.aiorpc"


class HelloReader:
    """A reader of the first messages of clients of TLS. It does no handshake."""

    def __init__(self) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.sni_callback = self._on_name  # OpenSSL calls it before anything is computed
        self._names: list[str | None] = []

    def read(self, data: bytes) -> str | None:
        """Return the purpose that the first message tells, None if it is not whole.

        Raises:
            ValueError: if another program has sent it.
        """
        received = ssl.MemoryBIO()
        self._names.clear()
        received.write(data)
        try:
            self._context.wrap_bio(received, ssl.MemoryBIO(), server_side=True).do_handshake()
        except ssl.SSLWantReadError:
            if len(data) < MAX_FIRST:
                return None
        except ssl.SSLError:
            pass  # by `_on_name`, or it is no TLS
        for purpose in PURPOSES:
            if server_name(purpose) in self._names:
                return purpose
        raise ValueError("it is no worker with TLS")

    def _on_name(self, _: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int:
        self._names.append(name)
        return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
