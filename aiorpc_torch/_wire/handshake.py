"""Mutual proof of a shared secret at the start of a connection.

The callee gives the caller a secret and the addresses of its listener by torch RPC. On the
connection the callee sends a nonce, then the caller its hello, then the callee its proof. Fresh
nonces exclude replays; labels of the roles exclude reflection. Nothing is encrypted. The handshake
rejects other processes and stale addresses. (tests/unit/wire/test_handshake.py)
"""

import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from .plain import dump, reader

NONCE = 16  # bytes
PROOF = 32  # bytes: HMAC-SHA256
VERSION = b"aiorpc/2"
"""Version of the protocol between two workers."""

_HELLO = struct.Struct(f"<8s16s{NONCE}sQ{PROOF}s")

HELLO = _HELLO.size  # bytes

CALLS, ARGUMENTS, RESULTS = range(3)
"""Purposes of a connection: calls and small values, both ways; tensors of arguments, to the callee;
tensors of results, to the caller."""

_PURPOSE_SHIFT = 62  # the number of a connection for calls is its own


def number_for(connection: int, purpose: int) -> int:
    """Return the number in the hello of a connection that serves connection number `connection`."""
    return purpose << _PURPOSE_SHIFT | connection


def read_number(number: int) -> tuple[int, int]:
    """Return the arguments of `number_for`."""
    return number & ((1 << _PURPOSE_SHIFT) - 1), number >> _PURPOSE_SHIFT


@dataclass(frozen=True, slots=True)
class Party:
    """A worker's process: its name and torch's worker id."""

    name: str
    worker_id: int


@dataclass(frozen=True, slots=True)
class Credentials:
    """Secrets that the caller and the callee of one introduction share."""

    caller: Party
    callee: Party
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Id of the introduction in the hello; not secret."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses that a worker listens on."""

    namespace: str
    """Network namespace; abstract Unix sockets are reachable within it."""
    unix: str
    """Name of an abstract Unix socket, without the leading zero byte."""
    tcp: tuple[str, int] | None = None
    """Host and port, if a peer is in another network namespace; else None."""


Introduction = tuple[Credentials, Addresses]
"""What a callee tells a caller that wants a connection."""


def dump_introduction(credentials: Credentials, addresses: Addresses) -> bytes:
    """Return the callee's answer to a caller that asks for an introduction."""
    return dump((credentials, addresses))


load_introduction: Callable[[bytes], Introduction] = reader(Introduction)
"""Return the arguments of `dump_introduction`."""


def new_nonce() -> bytes:
    """Return a nonce for one connection."""
    return secrets.token_bytes(NONCE)


def encode_hello(credentials: Credentials, connection: int, theirs: bytes, mine: bytes) -> bytes:
    """Return the caller's hello: key of the introduction, connection, and proof of the secret.

    `theirs` is the nonce of the callee, `mine` the caller's.
    """
    proof = _prove(b"client", credentials, connection, theirs, mine)
    return _HELLO.pack(VERSION, credentials.key, mine, connection, proof)


@dataclass(frozen=True, slots=True)
class Hello:
    """A received hello, not verified yet."""

    key: bytes
    nonce: bytes
    connection: int
    proof: bytes

    @classmethod
    def load(cls, data: bytes) -> "Hello":
        """Decode HELLO bytes.

        Raises:
            ValueError: if they belong to another protocol or version.
        """
        version, *rest = _HELLO.unpack(data)
        if version != VERSION:
            raise ValueError(f"a hello must start with {VERSION!r}, got {version!r}")
        key, nonce, connection, proof = rest
        return cls(key, nonce, connection, proof)

    def is_proven(self, credentials: Credentials, mine: bytes) -> bool:
        """Return whether the caller knows the secret; `mine` is the callee's nonce."""
        expected = _prove(b"client", credentials, self.connection, mine, self.nonce)
        return hmac.compare_digest(expected, self.proof)

    def callee_proof(self, credentials: Credentials, mine: bytes) -> bytes:
        """Return the callee's proof."""
        return _prove(b"server", credentials, self.connection, mine, self.nonce)


def is_callee_proven(
    credentials: Credentials, connection: int, theirs: bytes, mine: bytes, proof: bytes
) -> bool:
    """Return whether the callee, whose nonce is `theirs`, knows the secret."""
    expected = _prove(b"server", credentials, connection, theirs, mine)
    return hmac.compare_digest(expected, proof)


def _prove(
    role: bytes, credentials: Credentials, connection: int, server: bytes, client: bytes
) -> bytes:
    parties = dump((credentials.caller, credentials.callee, connection))
    text = b"|".join((role, VERSION, server.hex().encode(), client.hex().encode(), parties))
    return hmac.digest(credentials.secret, text, "sha256")
