"""A value in etcd that changes by compare-and-swap, and the URL that names it.

Requests go to etcd's JSON gateway, which etcd 3.4 and later has at its client port. The package
etcd3gw sends them; it is imported when a value is made. Each request has a connection of its own: a
connection that was kept may have been closed by the other end, which leaves the outcome unknown.

Each request runs in a thread, which is given up after a time limit. The limits of `requests` hold
for one step each: neither for the lookup of a name, nor for an answer that arrives slowly.

The key has a lease, granted by the `swap` that creates the key. Later swaps keep this lease. It is
revoked with the key, so a delayed request of its creator cannot create the key again.
(tests/network/test_etcd_value.py)
"""

import base64
import contextlib
import functools
import json
import os
import ssl
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from .._aio.threads import ThreadCache
from .._port.tls import reading

E = TypeVar("E", bound=BaseException)

EXTRA = "pip install 'aiorpc_torch[etcd]'"
PASSWORD_VARIABLE = "AIORPC_TORCH_ETCD_PASSWORD"
CALL_TIMEOUT = 5.0  # seconds for a call: over two elections of etcd's default settings
ATTEMPT_TIMEOUT = 1.5  # seconds for one member: then the next one is asked
ROUND_PAUSE = 0.1  # seconds before the members are asked again
TOKEN_AGE = 60.0  # seconds that a token is used: etcd's default is that it lasts 300
LEASE_TTL = 600  # seconds after the last swap until etcd removes the key

_URL = "etcd://host:port/name"
_MORE_MEMBERS = "etcd://host1:port,host2:port,host3:port/name"
_USER = "etcd://user:password@host:port/name"
_TLS = "etcd://host:port/name?ca=/path/ca.pem"

# Of gRPC, as the gateway sends them.
_INVALID_ARGUMENT, _NOT_FOUND, _PERMISSION_DENIED = 3, 5, 7
_FAILED_PRECONDITION, _UNAUTHENTICATED = 9, 16
_NOT_RUN = {
    _INVALID_ARGUMENT,
    _NOT_FOUND,
    _PERMISSION_DENIED,
    _FAILED_PRECONDITION,
    _UNAUTHENTICATED,
}

_threads = ThreadCache("aiorpc-etcd")

Request = dict[str, Any]


# ── the URL ─────────────────────────────────────────────────────────────────────────────────────


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
    ca: str = ""
    """File with the certificate of the authority, "" for the public ones."""
    cert: str = ""
    key: str = ""

    @classmethod
    def parse(cls, url: str) -> "Place":
        """Return the parts of `url`.

        Raises:
            ValueError: if the URL is malformed; it says what to write.
        """
        # `urlsplit` knows one host, and refuses an IPv6 address behind another host.
        scheme, separator, rest = url.partition("://")
        rest, _, query = rest.partition("?")
        hosts, _, name = rest.partition("/")
        login, at, hosts = hosts.rpartition("@")
        # No part is quoted below: with a "/" in a password each could be a part of the password.
        if scheme != "etcd" or not separator or not hosts:
            raise ValueError(f"the URL must begin with etcd:// and a host: write {_URL}")
        if "#" in url:
            raise ValueError(f"the URL has a '#': write %23 in its place, as in {_URL}")
        if not name:
            raise ValueError(f"the URL has no name after its hosts: write {_URL}")
        user, password = _parse_login(login) if at else ("", "")
        members = tuple(_parse_member(each) for each in hosts.split(","))
        return cls(members, unquote(name), user, password, **_parse_query(query))

    def __str__(self) -> str:
        return f"etcd://{','.join(map(str, self.members))}/{self.name}"

    def check_files(self) -> None:
        """Raise ValueError if a file of the URL cannot be used; it names the file."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for name, file in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            if file:
                with reading(f"{name}={file} of the URL"):
                    Path(file).read_bytes()  # OpenSSL does not tell which one is missing
        if self.ca:
            with reading(f"ca={self.ca} of the URL"):
                context.load_verify_locations(self.ca)
        if self.cert:
            with reading(f"cert={self.cert} with key={self.key} of the URL"):
                context.load_cert_chain(self.cert, self.key, _no_password)


def _parse_login(login: str) -> tuple[str, str]:
    user, colon, password = login.partition(":")
    if not user:
        raise ValueError(f"the URL has no user before '@': write {_USER}")
    password = unquote(password) if colon else os.environ.get(PASSWORD_VARIABLE, "")
    if not password:
        raise ValueError(
            f"the URL has a user without a password: write {_USER}, or set {PASSWORD_VARIABLE}"
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
            f"{_MORE_MEMBERS}, and %2F for a '/' and %3F for a '?' in a password"
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
                f"write {_TLS}"
            )
        given[name] = unquote(value)
    if given.pop("tls", "1") != "1":
        raise ValueError("tls= in the URL must be 1: leave it out for a connection without TLS")
    if ("cert" in given) != ("key" in given):
        raise ValueError("the URL must have both cert= and key=, or none: they are two files")
    return {"has_tls": bool(query), **given}


def _no_password() -> str:
    raise ValueError("the key is encrypted: give a file with a key that is not")


# ── requests ────────────────────────────────────────────────────────────────────────────────────


class _Failure(Exception):
    """No usable answer from one member.

    Attributes:
        may_have_run: False if the request had no effect, and will have none.
        may_pass: True if the member may answer in this call, without help.
    """

    def __init__(self, text: str, *, may_have_run: bool, may_pass: bool) -> None:
        super().__init__(text)
        self.may_have_run = may_have_run
        self.may_pass = may_pass


class _Answer(NamedTuple):
    body: dict[str, Any]
    is_repeated: bool
    """Whether an earlier attempt may have run, or will."""


class _Cluster:
    """The members of etcd: a request goes to one after the other, until one answers."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._answered = place.members[0]  # the last one that did: it is asked first
        self._token: str | None = None
        self._token_end = 0.0

    def ask(self, path: str, request: Request, end: float) -> _Answer:
        """Send a request, and return its answer.

        Args:
            path: Path of the method, behind "/v3/".
            request: Arguments of the method.
            end: Time of `time.monotonic()` at which to give up.

        Raises:
            OSError: if no member answers; the request may have run.
            PermissionError: if etcd refuses the user.
        """
        failures: dict[Member, str] = {}
        is_repeated, may_pass = False, True
        while may_pass:
            may_pass = False
            for member in self._in_order():
                if (left := end - time.monotonic()) <= 0:
                    raise self._not_reached(failures)
                try:
                    body = self._attempt(member, path, request, min(left, ATTEMPT_TIMEOUT))
                except _Failure as exc:
                    failures.setdefault(member, str(exc))
                    is_repeated |= exc.may_have_run
                    may_pass |= exc.may_pass
                else:
                    self._answered = member
                    return _Answer(body, is_repeated)
            if may_pass:
                time.sleep(ROUND_PAUSE)
        raise self._not_reached(failures)

    def _in_order(self) -> list[Member]:
        members = self._place.members
        first = members.index(self._answered)
        return [*members[first:], *members[:first]]

    def _not_reached(self, failures: dict[Member, str]) -> OSError:
        found = "; ".join(f"{member}: {text}" for member, text in failures.items())
        return OSError(
            f"no answer from etcd for {self._place}: {found or 'no time was left'}. Check that "
            "most of its members run, and their addresses"
        )

    def _attempt(
        self, member: Member, path: str, request: Request, seconds: float
    ) -> dict[str, Any]:
        """Run `_exchange` in a thread, which is given up after `seconds`."""
        outcome: Future[dict[str, Any]] = Future()
        try:
            _threads(functools.partial(self._settle, outcome, member, path, request))
        except RuntimeError as exc:  # the system has no more threads, or Python ends
            raise OSError(f"no request to etcd at {member}: {exc}") from exc
        try:
            return outcome.result(seconds)
        except TimeoutError:
            raise _silent() from None

    def _settle(
        self, outcome: "Future[dict[str, Any]]", member: Member, path: str, request: Request
    ) -> None:
        try:
            outcome.set_result(self._exchange(member, path, request))
        except BaseException as exc:
            outcome.set_exception(exc)

    def _exchange(self, member: Member, path: str, request: Request) -> dict[str, Any]:
        """Log in, if there is a user, and send a request."""
        try:
            token = self._log_in(member) if self._place.user else None
        except _Failure as exc:
            exc.may_have_run = False
            raise
        try:
            return _post(self._place, member, path, request, token)
        except _Failure:
            # Not only if etcd says so: for a token that has run out, or that a restarted member
            # does not know, some etcds close the connection. (etcd's issues 15256 and 20332)
            self._token = None
            raise

    def _log_in(self, member: Member) -> str:
        token = self._token  # another thread may drop it
        if token is None or time.monotonic() > self._token_end:
            login = {"name": self._place.user, "password": self._place.password}
            answer = _post(self._place, member, "auth/authenticate", login, None)
            token = str(answer["token"])
            self._token_end = time.monotonic() + TOKEN_AGE
            self._token = token
        return token


def _require_extra() -> None:
    try:
        import etcd3gw  # noqa: F401
    except ImportError as exc:
        raise ImportError(f"an etcd:// URL needs etcd3gw: {EXTRA}") from exc


def _post(
    place: Place, member: Member, path: str, request: Request, token: str | None
) -> dict[str, Any]:
    """Send one request to one member, and return its answer."""
    import requests
    from etcd3gw import Etcd3Client
    from etcd3gw.exceptions import Etcd3Exception

    with requests.Session() as session:
        # The environment's proxies and .netrc are for other servers. The latter's password would
        # replace the token.
        session.trust_env = False
        session.verify = place.ca or True
        session.cert = (place.cert, place.key) if place.cert else None
        client = Etcd3Client(
            member.host,
            member.port,
            protocol="https" if place.has_tls else "http",
            timeout=ATTEMPT_TIMEOUT,
            api_path="/v3/",
            session=session,
        )
        headers = {"Authorization": token} if token else {}
        try:
            answer = client.post(client.get_url(path), json=request, headers=headers)
        except Etcd3Exception as exc:
            # `requests` failed, or the answer has an error.
            error = exc.__context__
            if isinstance(error, requests.RequestException):
                raise _transport_failure(error, place) from exc
            raise _etcd_failure(exc.detail_text or "", place) from exc
        except ValueError as exc:
            raise _no_etcd(str(exc)) from exc
        except OSError as exc:
            raise _Failure(str(exc), may_have_run=True, may_pass=True) from exc
    # A stream's answer has its header one level below.
    if not isinstance(answer, dict) or not answer.keys() & {"header", "result"}:
        raise _no_etcd(str(answer))
    return answer


def _transport_failure(exc: BaseException, place: Place) -> _Failure:
    """Return the failure for an exception of `requests`."""
    import requests
    from urllib3.exceptions import NewConnectionError

    if error := _cause(exc, ssl.SSLError):
        return _Failure(_tls_text(error, place), may_have_run=True, may_pass=False)
    if _cause(exc, NewConnectionError):  # of an address or a name
        refused = _cause(exc, OSError, but=(requests.RequestException,))
        text = (refused and refused.strerror) or "it is not reached"
        return _Failure(text, may_have_run=False, may_pass=False)
    if isinstance(exc, requests.ConnectTimeout):
        return _Failure("no connection", may_have_run=False, may_pass=True)
    if isinstance(exc, requests.Timeout) or _cause(exc, TimeoutError):
        return _silent()
    remedies = []
    if not place.has_tls:
        remedies.append(f"if it uses TLS, write {_TLS}")
    elif not place.cert:
        remedies.append("if it asks for a certificate, add cert= and key= to the URL")
    if not place.user:
        remedies.append(f"if it has users, write {_USER}")
    text = "; ".join(["it closed the connection without an answer", *remedies])
    return _Failure(text, may_have_run=True, may_pass=True)


def _etcd_failure(text: str, place: Place) -> _Failure:
    """Return the failure for the text of an error of etcd.

    Raises:
        PermissionError: if etcd refuses the user: every member would.
    """
    try:
        body = json.loads(text)
        code, message = body["code"], str(body.get("message") or body.get("error"))
    except (ValueError, TypeError, LookupError, AttributeError):
        return _no_etcd(text)
    if code == _UNAUTHENTICATED or "revision of auth store is old" in message:
        return _Failure(message, may_have_run=False, may_pass=True)  # with a new token
    if "user name is empty" in message:
        raise PermissionError(f"etcd at {place} has users: write {_USER}")
    if "authentication failed" in message:
        raise PermissionError(
            f"etcd at {place} refuses the user {place.user!r} or its password: correct them in the "
            f"URL, or the password in {PASSWORD_VARIABLE}"
        )
    if "authentication is not enabled" in message:
        raise PermissionError(
            f"etcd at {place} has no users: leave out user:password@, or call `etcdctl auth enable`"
        )
    if code == _PERMISSION_DENIED:
        raise PermissionError(
            f"the user {place.user!r} of etcd at {place} has no rights: give them by `etcdctl role "
            f"grant-permission ROLE readwrite {_key(place)}`"
        )
    is_run = code not in _NOT_RUN
    return _Failure(message, may_have_run=is_run, may_pass=is_run)


def _silent() -> _Failure:
    text = f"no answer within {ATTEMPT_TIMEOUT:g} s"
    return _Failure(text, may_have_run=True, may_pass=True)


def _no_etcd(answer: str) -> _Failure:
    # The answer may have the reason: with users, etcd refuses a certificate with a CommonName.
    text = f"no answer of etcd's JSON gateway, which etcd 3.4 and later has: {answer[:200]!r}"
    if "HTTPS" in answer:
        text += f"; write {_TLS}"
    return _Failure(text, may_have_run=True, may_pass=False)


def _tls_text(error: ssl.SSLError, place: Place) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        where = f"ca={place.ca}" if place.ca else "the public authorities"
        return (
            f"its certificate is refused, by {where}: {error.verify_message}; give the file of its "
            "authority with ca= in the URL"
        )
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return (
        f"no TLS connection: {reason}; if it asks for a certificate, add cert= and key= to the "
        "URL, and if it does not use TLS, leave out all of ca=, cert=, key= and tls="
    )


def _cause(
    exc: BaseException | None, kind: type[E], but: tuple[type[BaseException], ...] = ()
) -> E | None:
    """Return the first exception of a kind among an exception and its causes."""
    while exc is not None:
        if isinstance(exc, kind) and not isinstance(exc, but):
            return exc
        exc = exc.__cause__ or exc.__context__
    return None


# ── the value ───────────────────────────────────────────────────────────────────────────────────


class _Found(NamedTuple):
    """A key of etcd as it was read."""

    value: bytes
    lease: int

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "_Found | None":
        """Return the key in the answer to a range request. The gateway leaves out zeros."""
        for each in answer.get("kvs", ()):
            return cls(base64.b64decode(each.get("value", "")), int(each.get("lease", 0)))
        return None


class EtcdValue:
    """A value in etcd that changes by compare-and-swap. Methods block, for some seconds at most.

        etcd://host:port[,host:port...]/name
        etcd://user:password@host:port/name?ca=/path/ca.pem&cert=/path/cert.pem&key=/path/key.pem

    The key is `aiorpc_torch/<name>`. etcd removes it `LEASE_TTL` seconds after its last `swap`.
    A value must not be written twice. The password may come from the environment instead, from
    AIORPC_TORCH_ETCD_PASSWORD. Each of `ca`, `cert`, `key` or `tls=1` turns TLS on; without `ca`
    the public authorities hold. "%" in a part of the URL encodes a character.

    A member that is silent for `ATTEMPT_TIMEOUT` seconds is passed over, and the next one is asked.

    Args:
        url: The URL.

    Raises:
        ValueError: if the URL is malformed, or if a file in it cannot be used.
        ImportError: without the extra `etcd`.
    """

    def __init__(self, url: str) -> None:
        self._place = Place.parse(url)
        _require_extra()
        self._place.check_files()
        self._cluster = _Cluster(self._place)
        self._key = _encode(_key(self._place).encode())

    def __str__(self) -> str:
        return str(self._place)

    def read(self) -> bytes | None:
        """Return the value, None if there is none. The read is linearizable.

        Raises:
            OSError: if no member of etcd answers.
            PermissionError: if etcd refuses the user. The other methods raise it too.
        """
        body, _ = self._cluster.ask("kv/range", {"key": self._key}, _end())
        found = _Found.of(body)
        return found and found.value

    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Write `new` if the value is `old`, None for no value; return whether it was written.

        Raises:
            OSError: if the outcome is unknown: no member answers, or one gave no answer and the
                value is another one now. `new` may have been written, and replaced since. It may
                even be written later, while the value is `old`.
        """
        if old is None:
            return self._create(new, _end())
        return self._replace(old, new, _end())

    def clear(self, old: bytes) -> None:
        """Remove the value if it is `old`.

        Raises:
            OSError: if no member of etcd answers. The value may be removed later.
        """
        end = _end()
        delete = {"request_delete_range": {"key": self._key, "prev_kv": True}}
        body, _ = self._cluster.ask("kv/txn", self._transaction(old, [delete], []), end)
        if body.get("succeeded"):
            [deleted] = body["responses"]
            found = _Found.of({"kvs": deleted["response_delete_range"].get("prev_kvs", ())})
            self._revoke(found.lease if found else 0, end)

    def close(self) -> None:
        """Do nothing: no connection is kept."""

    def _create(self, new: bytes, end: float) -> bool:
        granted, _ = self._cluster.ask("lease/grant", {"TTL": LEASE_TTL, "ID": 0}, end)
        lease = int(granted["ID"])
        put = {"request_put": {"key": self._key, "value": _encode(new), "lease": lease}}
        body, is_repeated = self._cluster.ask(
            "kv/txn", self._transaction(None, [put], [self._range()]), end
        )
        if body.get("succeeded"):
            return True
        found = _last_range(body)
        if found is not None and found.lease == lease:
            return True  # an attempt without an answer wrote it, and it may have been replaced
        self._revoke(lease, end)  # an attempt that is still under way fails
        if is_repeated:
            raise self._unknown()
        return False

    def _replace(self, old: bytes, new: bytes, end: float) -> bool:
        put = {"request_put": {"key": self._key, "value": _encode(new), "ignore_lease": True}}
        body, is_repeated = self._cluster.ask(
            "kv/txn", self._transaction(old, [put, self._range()], [self._range()]), end
        )
        found = _last_range(body)
        # An attempt without an answer may have written it.
        is_new = is_repeated and found is not None and found.value == new
        if not body.get("succeeded") and not is_new:
            if is_repeated:
                raise self._unknown()
            return False
        if found is not None:
            self._keep_alive(found.lease, end)
        return True

    def _transaction(
        self, old: bytes | None, success: list[Request], failure: list[Request]
    ) -> Request:
        compare: Request = {"key": self._key, "result": "EQUAL"}
        if old is None:
            compare |= {"target": "CREATE", "create_revision": 0}
        else:
            compare |= {"target": "VALUE", "value": _encode(old)}
        return {"compare": [compare], "success": success, "failure": failure}

    def _range(self) -> Request:
        return {"request_range": {"key": self._key}}

    def _unknown(self) -> OSError:
        return OSError(
            f"the value may have been written to {self}, and replaced: a member of etcd gave no "
            "answer. Read the value, and try again"
        )

    def _keep_alive(self, lease: int, end: float) -> None:
        # The value is written. If this fails, the lease lasts since the swap before.
        with contextlib.suppress(OSError):
            self._cluster.ask("lease/keepalive", {"ID": lease}, end)

    def _revoke(self, lease: int, end: float) -> None:
        # If this fails, the lease ends after its time.
        with contextlib.suppress(OSError):
            self._cluster.ask("lease/revoke", {"ID": lease}, end)


def _key(place: Place) -> str:
    return f"aiorpc_torch/{place.name}"


def _end() -> float:
    return time.monotonic() + CALL_TIMEOUT


def _last_range(body: dict[str, Any]) -> _Found | None:
    return _Found.of(body["responses"][-1]["response_range"])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
