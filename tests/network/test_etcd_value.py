"""A value in etcd: one winner of each swap, members that die or freeze, users, TLS, leases."""

import base64
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from tests.support.certificates import CURVE, Authority, openssl
from tests.support.etcd_servers import START, Cluster, Member, eventually, needs_etcd, running
from tests.support.slack import SLACK

T = TypeVar("T")

pytestmark = pytest.mark.slow
THREADS = 100
LEASE_TTL = 600  # seconds
CALL_TIMEOUT = 5.0  # seconds of a read, swap or clear
PASSWORD_VARIABLE = "AIORPC_TORCH_ETCD_PASSWORD"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of one."""
    with running(Member(tmp_path / "m0")) as cluster:
        yield cluster


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of three, all of which answer."""
    with running(*(Member(tmp_path / f"m{number}") for number in range(3))) as cluster:
        for each in cluster.members:
            eventually(Cluster([each]).value().read)
        yield cluster


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + START
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def at_once(tasks: Sequence[Callable[[], None]]) -> None:
    """Run each task in a thread of its own; raise what one of them raises."""
    gate, failures = threading.Barrier(len(tasks)), list[BaseException]()

    def run(task: Callable[[], None]) -> None:
        gate.wait()
        try:
            task()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise failures[0]


def append(value: Any, mark: bytes) -> None:
    """Add a mark to the marks of a value, exactly once."""
    in_doubt = False
    end = time.monotonic() + START
    while time.monotonic() < end:
        try:
            old = value.read()
            if mark in (old or b"").split():
                assert in_doubt, "a swap returned False, and had written"
                return
            if value.swap(old, mark if old is None else old + b" " + mark):
                return
        except OSError:
            in_doubt = True
    raise AssertionError("no swap in time")


# ── read, swap, clear ───────────────────────────────────────────────────────────────────────────


@needs_etcd
def test_read_swap_clear(alone: Cluster) -> None:
    """Each acts on the value that it is told, also on bytes that are no text."""
    value, other = alone.value(), alone.value()
    assert value.read() is None
    value.clear(b"a")
    assert not value.swap(b"a", b"b")
    first = bytes(range(256))
    assert value.swap(None, first)
    assert not other.swap(None, b"late")
    assert other.read() == first
    assert other.swap(first, b"")
    assert value.read() == b""
    assert value.swap(b"", b"2")
    assert not other.swap(first, b"late")
    assert not other.swap(first, b"2")
    value.clear(b"1")
    assert value.read() == b"2"
    other.clear(b"2")
    other.clear(b"2")
    assert value.read() is None
    assert not value.swap(b"2", b"3")
    assert value.swap(None, b"4")


@needs_etcd
def test_names_are_keys(alone: Cluster) -> None:
    """The key has a prefix; each name has a value of its own."""
    names = {"a": b"a", "b/c": b"bc", "%C3%BC%3F": "aiorpc_torch/ü?".encode()}
    for name, data in names.items():
        assert alone.value(name=name).swap(None, data)
    assert [alone.value(name=name).read() for name in names] == [*names.values()]
    assert kv(alone, "aiorpc_torch/ü?")["value"] == encode(names["%C3%BC%3F"])


@needs_etcd
def test_one_of_a_hundred_threads_wins(alone: Cluster) -> None:
    """For each value, the first one included."""
    values = [alone.value() for _ in range(THREADS)]
    old: bytes | None = None
    for step in range(4):
        won, unknown = list[bytes](), list[bytes]()

        def swap(number: int, old: bytes | None = old, step: int = step) -> None:
            new = b"%d of %d" % (number, step)
            try:
                if values[number].swap(old, new):
                    won.append(new)  # noqa: B023 - the threads end in this iteration
            except OSError:  # on a machine that is busy for seconds
                unknown.append(new)  # noqa: B023

        at_once([lambda number=number: swap(number) for number in range(THREADS)])
        winner = eventually(values[0].read)
        assert won == [winner] or (won == [] and winner in unknown)
        old = winner


@needs_etcd
def test_no_increment_is_lost(alone: Cluster) -> None:
    """Threads that read and swap in a loop, some with one value for all."""
    shared = alone.value()

    def count(number: int) -> None:
        value = shared if number % 2 else alone.value()
        for step in range(5):
            append(value, b"%d.%d" % (number, step))

    at_once([lambda number=number: count(number) for number in range(8)])
    marks = (shared.read() or b"").split()
    assert sorted(marks) == sorted(b"%d.%d" % (n, step) for n in range(8) for step in range(5))


# ── leases ──────────────────────────────────────────────────────────────────────────────────────


def kv(cluster: Cluster, key: str = "aiorpc_torch/world") -> dict[str, Any]:
    [found] = cluster.members[0].ask("kv/range", key=encode(key.encode()))["kvs"]
    return dict(found)


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


@needs_etcd
def test_the_lease_of_a_key(alone: Cluster) -> None:
    """It lasts from the last swap on, whoever swaps, and ends with the key."""

    def seconds_left() -> int:
        return int(alone.members[0].ask("lease/timetolive", ID=lease).get("TTL", 0))

    value, other = alone.value(), alone.value()
    assert value.swap(None, b"1")
    lease = kv(alone)["lease"]
    assert LEASE_TTL - 5 <= seconds_left() <= LEASE_TTL
    assert not other.swap(None, b"2")
    until(lambda: seconds_left() < LEASE_TTL - 2)
    before = seconds_left()
    assert not other.swap(b"2", b"3")
    assert other.swap(b"1", b"2")
    assert seconds_left() > before
    assert kv(alone)["lease"] == lease
    assert [each["ID"] for each in alone.members[0].ask("lease/leases")["leases"]] == [lease]
    value.clear(b"2")
    assert alone.members[0].ask("lease/leases").get("leases", []) == []


# ── members that fail ───────────────────────────────────────────────────────────────────────────


@needs_etcd
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_two_of_three_members_go_on(three: Cluster, fault: signal.Signals) -> None:
    """Without a follower at once; without the leader once the others have a new one."""
    value = three.value()
    append(value, b"start")
    marks = [b"start"]
    for is_leader in (False, True):
        victim = next(each for each in three.members if each.is_leader() == is_leader)
        value = beginning_with(three, victim).value()
        victim.send(fault)
        begin = time.monotonic()
        if not is_leader:
            assert (value.read() or b"").split() == marks
            assert time.monotonic() - begin < CALL_TIMEOUT
        for step in range(3):
            mark = b"%s-%d" % (victim.name.encode(), step)
            append(value, mark)
            marks.append(mark)
        print(f"{victim.name}, leader: {is_leader}: {time.monotonic() - begin:.2f} s")
        assert eventually(three.value().read) == b" ".join(marks)
        if fault == signal.SIGSTOP:
            victim.send(signal.SIGCONT)
        else:
            victim.end()
            three.start([victim])
        eventually(Cluster([victim]).value().read)
    assert (value.read() or b"").split() == marks


def beginning_with(cluster: Cluster, member: Member) -> Cluster:
    """Return a cluster in whose URL `member` is the first."""
    return Cluster(sorted(cluster.members, key=lambda each: each is not member))


@needs_etcd
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_no_member_answers(three: Cluster, fault: signal.Signals) -> None:
    """Each call ends with an error in seconds, and works again when they do."""
    value = three.value()
    assert value.swap(None, b"1")
    for each in three.members:
        each.send(fault)
        if fault == signal.SIGKILL:
            each.end()
    calls: list[Callable[[], object]] = [
        value.read,
        lambda: value.swap(b"1", b"2"),
        lambda: value.swap(None, b"3"),
        lambda: value.clear(b"1"),
    ]

    def fails(call: Callable[[], object]) -> None:
        with pytest.raises(OSError, match="no answer from etcd"):
            call()

    begin = time.monotonic()
    at_once([lambda call=call: fails(call) for call in calls])
    assert time.monotonic() - begin < CALL_TIMEOUT + SLACK
    if fault == signal.SIGKILL:
        three.start()
    else:
        for each in three.members:
            each.send(signal.SIGCONT)
    # A request that a frozen member had received may run now.
    assert eventually(value.read) in (b"1", b"2", b"3", None)


# ── users ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def users(alone: Cluster) -> Cluster:
    """An etcd with a user for the keys of this library, and one without rights."""
    ask = alone.members[0].ask
    ask("auth/role/add", name="root")
    ask("auth/role/add", name="worlds")
    prefix = {"key": encode(b"aiorpc_torch/"), "range_end": encode(b"aiorpc_torch0")}
    ask("auth/role/grant", name="worlds", perm={"permType": "READWRITE", **prefix})
    for user, roles in {"root": ["root"], "wörker": ["worlds"], "guest": []}.items():
        ask("auth/user/add", name=user, password=f"{user}:/?")
        for role in roles:
            ask("auth/user/grant", user=user, role=role)
    ask("auth/enable")
    return alone


WORKER = "w%C3%B6rker:w%C3%B6rker%3A%2F%3F@"


@needs_etcd
def test_users(users: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The password is in the URL or in the environment; an error names the remedy, never it."""
    value = users.value(login=WORKER)
    assert value.swap(None, b"1")
    assert value.swap(b"1", b"2")
    monkeypatch.setenv(PASSWORD_VARIABLE, "wörker:/?")
    assert users.value(login="w%C3%B6rker@").read() == b"2"
    assert users.value(login=WORKER).read() == b"2"
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
    with pytest.raises(PermissionError, match=PASSWORD_VARIABLE) as wrong:
        users.value(login="w%C3%B6rker@").read()
    assert "secret" not in str(wrong.value)
    with pytest.raises(OSError, match="user:password@"):
        users.value().read()
    with pytest.raises(OSError, match=r"grant-permission ROLE readwrite aiorpc_torch/world|users"):
        users.value(login="guest:guest%3A%2F%3F@").read()
    value.clear(b"2")
    assert value.read() is None


@needs_etcd
def test_a_token_that_has_run_out(users: Cluster) -> None:
    """A member that was restarted knows no token: the next attempt has a new one."""
    value = users.value(login=WORKER)
    assert value.swap(None, b"1")
    [member] = users.members
    for step in range(1, 3):
        member.end()
        users.start()
        eventually(users.value(login=WORKER).read)
        assert value.swap(b"%d" % step, b"%d" % (step + 1))


@needs_etcd
def test_a_password_that_is_not_needed(alone: Cluster) -> None:
    """etcd without users takes none."""
    with pytest.raises(PermissionError, match="has no users"):
        alone.value(login="a:b@").read()


# ── TLS ─────────────────────────────────────────────────────────────────────────────────────────


class Named(Authority):
    """An authority whose certificates are for 127.0.0.1."""

    def files(self, name: str = "server", days: int = 2) -> tuple[str, str, str]:
        cert, key, request = (str(self.folder / f"{name}.{end}") for end in ("pem", "key", "csr"))
        extensions = self.folder / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        openssl("req", *CURVE, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed = ("-CA", str(self.ca), "-CAkey", self._key, "-CAcreateserial", "-days", str(days))
        openssl("x509", "-req", "-in", request, "-out", cert, "-extfile", str(extensions), *signed)
        return cert, key, str(self.ca)


class Asking(NamedTuple):
    """A cluster that asks for certificates, and a value of a client that has one."""

    cluster: Cluster
    authority: Authority
    value: Any
    ca: str
    own: str
    """File with the client's certificate."""


@contextlib.contextmanager
def asking_for_certificates(folder: Path, name: str) -> Iterator[Asking]:
    authority = Named(folder)
    cert, key, ca = authority.files()
    own, own_key, _ = authority.files(name)
    options = ("--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca)
    query = f"?ca={ca}&cert={own}&key={own_key}".replace(" ", "%20")
    member = Member(folder / "m0", (*options, "--client-cert-auth"), "https")
    with running(member, query=query) as cluster:
        value = cluster.value(query=query)
        assert value.swap(None, b"1")
        yield Asking(cluster, authority, value, ca, own)


@needs_etcd
def test_tls_with_certificates_of_clients(tmp_path: Path) -> None:
    """etcd refuses a client without one."""
    with asking_for_certificates(tmp_path, "worker of a team") as etcd:
        assert etcd.value.swap(b"1", b"2")
        with pytest.raises(OSError, match="cert= and key="):
            etcd.cluster.value(query=f"?ca={etcd.ca}").read()


@needs_etcd
@pytest.mark.promise("security.renewal")
def test_files_of_the_url_that_are_renewed(tmp_path: Path) -> None:
    """Each request reads them. An error names the side whose certificate has expired."""
    with asking_for_certificates(tmp_path, "own") as etcd:
        etcd.authority.files("own", days=-1)
        with pytest.raises(OSError, match=rf"refuses? the certificate, cert={etcd.own}"):
            etcd.value.read()
        etcd.authority.files("own")
        assert etcd.value.read() == b"1"


@needs_etcd
def test_tls_that_etcd_does_not_use(alone: Cluster) -> None:
    """The error says to leave it out."""
    with pytest.raises(OSError, match="leave out"):
        alone.value(query="?tls=1").read()
