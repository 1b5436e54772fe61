"""Proof of a shared secret at the start of a connection, in both directions.

torch RPC introduces two workers to each other: the callee gives the caller a secret and the
addresses of its listener. On the connection the callee sends a nonce, the caller its hello, the
callee its proof. Fresh nonces exclude replays, the labels of the roles exclude reflection. Nothing
is encrypted: it keeps strangers and stale addresses out. (tests/test_handshake.py)
"""

import hmac
import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass, field

NONCE = 16  # bytes
PROOF = 32  # bytes: HMAC-SHA256
_VERSION = b"aiorpc/1"
_HELLO = struct.Struct(f"<8s16s{NONCE}sQ{PROOF}s")

HELLO = _HELLO.size  # bytes


@dataclass(frozen=True, slots=True)
class Party:
    """A worker's process: its name, and the number that torch knows it by."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the caller and the callee of one introduction share."""

    caller: Party
    callee: Party
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Names the introduction in the hello; it is no secret."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a worker listens."""

    namespace: str
    """Of the network; abstract Unix sockets are reached within it."""
    unix: str
    """Name of an abstract Unix socket, without its leading zero byte."""
    tcp: tuple[str, int] | None = None
    """Host and port, if a peer is in another network namespace."""


def dump_introduction(credentials: Credentials, addresses: Addresses) -> bytes:
    """Return what the callee answers to a caller that asks for an introduction."""
    words = asdict(credentials) | {"addresses": asdict(addresses)}
    words |= {each: words[each].hex() for each in ("key", "secret")}
    return json.dumps(words).encode()


def load_introduction(data: bytes) -> tuple[Credentials, Addresses]:
    """Return what `dump_introduction` was given."""
    words = json.loads(data)
    where = words.pop("addresses")
    tcp = None if where["tcp"] is None else (where["tcp"][0], where["tcp"][1])
    credentials = Credentials(
        Party(**words["caller"]),
        Party(**words["callee"]),
        bytes.fromhex(words["key"]),
        bytes.fromhex(words["secret"]),
    )
    return credentials, Addresses(where["namespace"], where["unix"], tcp)


def new_nonce() -> bytes:
    """Return a nonce for one connection."""
    return secrets.token_bytes(NONCE)


def hello(credentials: Credentials, link: int, theirs: bytes, mine: bytes) -> bytes:
    """Return the caller's message: which introduction, which link, and the proof of the secret.

    Args:
        credentials: of the introduction.
        link: number of the connection among those of the caller's process.
        theirs: the callee's nonce.
        mine: the caller's nonce.
    """
    proof = _prove(b"client", credentials, link, theirs, mine)
    return _HELLO.pack(_VERSION, credentials.key, mine, link, proof)


@dataclass(frozen=True, slots=True)
class Hello:
    """A caller's message that was received, not verified yet."""

    key: bytes
    nonce: bytes
    link: int
    proof: bytes

    @classmethod
    def load(cls, data: bytes) -> "Hello":
        """Read HELLO bytes.

        Raises:
            ValueError: if they are of another protocol or version.
        """
        version, *rest = _HELLO.unpack(data)
        if version != _VERSION:
            raise ValueError(f"a hello starts with {_VERSION!r}, got {version!r}")
        key, nonce, link, proof = rest
        return cls(key, nonce, link, proof)

    def is_proven(self, credentials: Credentials, mine: bytes) -> bool:
        """Return whether the caller knows the secret; `mine` is the callee's nonce."""
        expected = _prove(b"client", credentials, self.link, mine, self.nonce)
        return hmac.compare_digest(expected, self.proof)

    def answer(self, credentials: Credentials, mine: bytes) -> bytes:
        """Return the callee's proof."""
        return _prove(b"server", credentials, self.link, mine, self.nonce)


def is_answered(
    credentials: Credentials, link: int, theirs: bytes, mine: bytes, proof: bytes
) -> bool:
    """Return whether the callee, whose nonce is `theirs`, knows the secret."""
    expected = _prove(b"server", credentials, link, theirs, mine)
    return hmac.compare_digest(expected, proof)


def _prove(role: bytes, credentials: Credentials, link: int, server: bytes, client: bytes) -> bytes:
    parties = json.dumps([asdict(credentials.caller), asdict(credentials.callee), link]).encode()
    text = b"|".join((role, _VERSION, server.hex().encode(), client.hex().encode(), parties))
    return hmac.digest(credentials.secret, text, "sha256")


def network_namespace() -> str:
    """Return what tells this process's network namespace from others, "" if it is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""
