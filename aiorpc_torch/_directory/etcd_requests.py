"""Requests to the members of etcd: one after the other is asked, until one answers.

Requests go to etcd's JSON gateway, which etcd 3.4 and later has at its client port. The package
etcd3gw sends them; it is imported with the first request. Each request has a connection of its own:
a connection that was kept may have been closed by the other end, which leaves the outcome unknown.

Each request runs in a thread, which is given up after a time limit, and its connection closed. Only
a thread that looks up a name goes on.
"""

import functools
import json
import ssl
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._aio.awaited import blocking_on
from .._aio.threads import ThreadCache
from .._text import printable
from .etcd_place import PASSWORD_VARIABLE, URL_WITH_TLS, URL_WITH_USER, Member, Place

if TYPE_CHECKING:
    from .etcd_sessions import Sockets

E = TypeVar("E", bound=BaseException)

EXTRA = "pip install 'aiorpc_torch[etcd]'"
ATTEMPT_TIMEOUT = 1.5  # seconds for one member: then the next one is asked
ROUND_PAUSE = 0.1  # seconds before the members are asked again
TOKEN_AGE = 60.0  # seconds that a token is used: etcd's default is that it lasts 300

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


class _Failure(Exception):
    """No usable answer from one member.

    Attributes:
        may_have_run: False if the request had no effect, and will have none.
        may_pass: True if the member may answer in this call, without help.
    """

    def __init__(self, text: str, *, may_have_run: bool, may_pass: bool) -> None:
        super().__init__(printable(text))
        self.may_have_run = may_have_run
        self.may_pass = may_pass


class Answer(NamedTuple):
    """The answer to a request."""

    body: dict[str, Any]
    is_repeated: bool
    """Whether an earlier attempt may have run, or will."""


class Cluster:
    """The members of etcd: a request goes to one after the other, until one answers."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._answered = place.members[0]  # the last one that did: it is asked first
        self._token: str | None = None
        self._token_end = 0.0

    def ask(self, path: str, request: Request, end: float) -> Answer:
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
                    with blocking_on(f"etcd at {member} does not answer: check that it runs"):
                        body = self._attempt(member, path, request, min(left, ATTEMPT_TIMEOUT))
                except _Failure as exc:
                    failures.setdefault(member, str(exc))
                    is_repeated |= exc.may_have_run
                    may_pass |= exc.may_pass
                else:
                    self._answered = member
                    return Answer(body, is_repeated)
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
        from .etcd_sessions import Sockets

        outcome, sockets = Future[dict[str, Any]](), Sockets()
        exchange = functools.partial(self._exchange, member, path, request, sockets)
        try:
            _threads(functools.partial(_settle, outcome, exchange))
        except RuntimeError as exc:  # the system has no more threads, or Python ends
            raise OSError(f"no request to etcd at {member}: {exc}") from exc
        try:
            return outcome.result(seconds)
        except TimeoutError:
            raise _silent() from None
        finally:
            sockets.close()

    def _exchange(
        self, member: Member, path: str, request: Request, sockets: "Sockets"
    ) -> dict[str, Any]:
        """Log in, if there is a user, and send a request."""
        try:
            token = self._log_in(member, sockets) if self._place.user else None
        except _Failure as exc:
            exc.may_have_run = False
            raise
        try:
            return _post(self._place, member, path, request, token, sockets)
        except _Failure:
            # Not only if etcd says so: for a token that has run out, or that a restarted member
            # does not know, some etcds close the connection. (etcd's issues 15256 and 20332)
            self._token = None
            raise

    def _log_in(self, member: Member, sockets: "Sockets") -> str:
        token = self._token  # another thread may drop it
        if token is None or time.monotonic() > self._token_end:
            login = {"name": self._place.user, "password": self._place.password}
            answer = _post(self._place, member, "auth/authenticate", login, None, sockets)
            token = str(answer["token"])
            self._token_end = time.monotonic() + TOKEN_AGE
            self._token = token
        return token


def _settle(outcome: "Future[dict[str, Any]]", exchange: Callable[[], dict[str, Any]]) -> None:
    try:
        outcome.set_result(exchange())
    except BaseException as exc:
        outcome.set_exception(exc)


def require_extra() -> None:
    """Raise ImportError if the extra `etcd` is not installed."""
    try:
        import etcd3gw  # noqa: F401
    except ImportError as exc:
        raise ImportError(f"an etcd:// URL needs etcd3gw: {EXTRA}") from exc


def _post(
    place: Place,
    member: Member,
    path: str,
    request: Request,
    token: str | None,
    sockets: "Sockets",
) -> dict[str, Any]:
    """Send one request to one member, and return its answer."""
    import requests
    from etcd3gw import Etcd3Client
    from etcd3gw.exceptions import Etcd3Exception

    from .etcd_sessions import Session

    with Session(sockets) as session:
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
        remedies.append(f"if it uses TLS, write {URL_WITH_TLS}")
    else:
        remedies.append("if it does not use TLS, leave out all of ca=, cert=, key= and tls=")
        if not place.cert:
            remedies.append("if it asks for a certificate, add cert= and key= to the URL")
        else:
            text = f"it may refuse the certificate, cert={place.cert}: has that expired?"
            remedies.append(text)
    if not place.user:
        remedies.append(f"if it has users, write {URL_WITH_USER}")
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
        raise PermissionError(f"etcd at {place} has users: write {URL_WITH_USER}")
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
            f"grant-permission ROLE readwrite {place.key_in_etcd}`"
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
        text += f"; write {URL_WITH_TLS}"
    return _Failure(text, may_have_run=True, may_pass=False)


def _tls_text(error: ssl.SSLError, place: Place) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        where = f"ca={place.ca}" if place.ca else "the public authorities"
        return (
            f"its certificate is refused, by {where}: {error.verify_message}; give the file of its "
            "authority with ca= in the URL"
        )
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason and place.cert:
        return f"it refuses the certificate, cert={place.cert} of the URL: {reason}"
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
