"""The URL of a place in etcd: its members, user and TLS files."""

import os
import ssl
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from .._aio.awaited import read_regular
from .._port.tls import reading

PASSWORD_VARIABLE = "AIORPC_TORCH_ETCD_PASSWORD"

URL = "etcd://host:port/name"
URL_WITH_USER = "etcd://user:password@host:port/name"
URL_WITH_TLS = "etcd://host:port/name?ca=/path/ca.pem"
_URL_OF_MEMBERS = "etcd://host1:port,host2:port,host3:port/name"


def is_etcd_url(url: str) -> bool:
    """Return whether a URL is one of etcd, perhaps a malformed one."""
    return url.startswith("etcd:")


class Member(NamedTuple):
    """The address at which one member of etcd listens for clients."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Place:
    """The parts of an `etcd://` URL. Its text has neither user nor password."""

    members: tuple[Member, ...]
    name: str
    user: str = ""
    password: str = field(default="", repr=False)
    has_tls: bool = False
    ca: str = ""  # file with the certificate of the authority, "" for the public ones
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, url: str) -> "Place":
        """Return the parts of `url`; raise a ValueError that says what to write."""
        # `urlsplit` knows one host, and refuses an IPv6 address behind another host.
        scheme, separator, rest = url.partition("://")
        rest, _, query = rest.partition("?")
        hosts, _, name = rest.partition("/")
        login, at, hosts = hosts.rpartition("@")
        # No part is quoted below: with a "/" in a password each could be a part of the password.
        if scheme != "etcd" or not separator or not hosts:
            raise ValueError(f"the URL must begin with etcd:// and a host: write {URL}")
        if "#" in url:
            raise ValueError(f"the URL has a '#': write %23 in its place, as in {URL}")
        if not name:
            raise ValueError(f"the URL has no name after its hosts: write {URL}")
        user, password = _parse_login(login) if at else ("", "")
        members = tuple(_parse_member(each) for each in hosts.split(","))
        return cls(members, unquote(name), user, password, **_parse_query(query))

    def __str__(self) -> str:
        return f"etcd://{','.join(map(str, self.members))}/{self.name}"

    @property
    def key_in_etcd(self) -> str:
        return f"aiorpc_torch/{self.name}"

    def check_files(self) -> None:
        """Raise ValueError if a file of the URL cannot be used; it names the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for name, file in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if file:
                with reading(f"{name}={file} of the URL"):
                    read_regular(file)  # OpenSSL does not tell which one is missing
        if self.ca:
            with reading(f"ca={self.ca} of the URL"):
                context.load_verify_locations(self.ca)
        if self.cert:
            with reading(f"cert={self.cert} with key={self.key} of the URL"):
                context.load_cert_chain(self.cert, self.key, _no_password)


def _parse_login(login: str) -> tuple[str, str]:
    user, colon, password = login.partition(":")
    if not user:
        raise ValueError(f"the URL has no user before '@': write {URL_WITH_USER}")
    password = unquote(password) if colon else os.environ.get(PASSWORD_VARIABLE, "")
    if not password:
        raise ValueError(
            "the URL has a user without a password: "
            f"write {URL_WITH_USER}, or set {PASSWORD_VARIABLE}"
        )
    return unquote(user), password


def _parse_member(text: str) -> Member:
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_number = port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
    if not host or not is_number or (":" in host) != is_bracketed or {*host} & {*"[]% \t\n"}:
        raise ValueError(
            f"each member in the URL must be host:port, with an IPv6 address in brackets: write "
            f"{_URL_OF_MEMBERS}, and %2F for a '/' and %3F for a '?' in a password"
        )
    return Member(host, int(port))


def _parse_query(query: str) -> dict[str, Any]:
    """Return the arguments of `Place` for TLS. A "+" in a path remains one."""
    given: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in ("tls", "ca", "cert", "key") or name in given or not value:
            raise ValueError(
                f"the URL may have ca=, cert= and key= with a file each, or tls=1, after its '?': "
                f"write {URL_WITH_TLS}"
            )
        given[name] = unquote(value)
    if given.pop("tls", "1") != "1":
        raise ValueError("tls= in the URL must be 1: leave it out for a connection without TLS")
    if ("cert" in given) != ("key" in given):
        raise ValueError("the URL must have both cert= and key=, or none: they are two files")
    return {"has_tls": bool(query), **given}


def _no_password() -> str:
    raise ValueError("the key is encrypted: give a file with a key that is not")
