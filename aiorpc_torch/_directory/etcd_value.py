"""A value in etcd that changes by compare-and-swap.

The key has a lease, granted by the `swap` that creates the key. Later swaps keep this lease. It is
revoked with the key, so a delayed request of its creator cannot create the key again.
(tests/network/test_etcd_value.py)
"""

import base64
import contextlib
import time
from typing import Any, NamedTuple

from .etcd_place import Place
from .etcd_requests import EXTRA, Cluster, Request
from .shared_values import SharedValue

CALL_TIMEOUT = 5.0  # seconds for a call: over two elections of etcd's default settings
LEASE_TTL = 600  # seconds after the last swap until etcd removes the key


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


class EtcdValue(SharedValue):
    """A value in etcd that changes by compare-and-swap. Methods block, for some seconds at most.

        etcd://host:port[,host:port...]/name
        etcd://user:password@host:port/name?ca=/path/ca.pem&cert=/path/cert.pem&key=/path/key.pem

    The key is `aiorpc_torch/<name>`. etcd removes it `LEASE_TTL` seconds after its last `swap`.
    A value must not be written twice. The password may come from the environment instead, from
    AIORPC_TORCH_ETCD_PASSWORD. Each of `ca`, `cert`, `key` or `tls=1` turns TLS on; without `ca`
    the public authorities hold. "%" in a part of the URL encodes a character.

    A member that is silent for `ATTEMPT_TIMEOUT` seconds is passed over, and the next one is asked.

    Raises ValueError if the URL is malformed, or if a file in it cannot be used, ImportError
    without the extra `etcd`.
    """

    def __init__(self, url: str) -> None:
        self._place = Place.parse(url)
        try:
            import etcd3gw  # noqa: F401
        except ImportError as exc:
            raise ImportError(f"an etcd:// URL needs etcd3gw: {EXTRA}") from exc
        self._place.check_files()
        self._cluster = Cluster(self._place)
        self._key = _encode(self._place.key_in_etcd.encode())
        self._range: Request = {"request_range": {"key": self._key}}

    def __str__(self) -> str:
        return str(self._place)

    def read(self) -> bytes | None:
        """Return the value, None if there is none. The read is linearizable. Raises OSError if no
        member of etcd answers, PermissionError if etcd refuses the user. The other methods raise it
        too.
        """
        end = time.monotonic() + CALL_TIMEOUT
        body, _ = self._cluster.ask("kv/range", {"key": self._key}, end)
        found = _Found.of(body)
        return found and found.value

    def swap(self, old: bytes | None, new: bytes) -> bool:
        """Write `new` if the value is `old`, None for no value; return whether it was written.
        Raises OSError if the outcome is unknown: no member answers, or one gave no answer and the
        value is another one now. `new` may have been written, and replaced since. It may even be
        written later, while the value is `old`.
        """
        end = time.monotonic() + CALL_TIMEOUT
        return self._create(new, end) if old is None else self._replace(old, new, end)

    def clear(self, old: bytes) -> None:
        """Remove the value if it is `old`, perhaps late. Raises OSError if no member answers."""
        end = time.monotonic() + CALL_TIMEOUT
        delete = {"request_delete_range": {"key": self._key, "prev_kv": True}}
        body, _ = self._cluster.ask("kv/txn", self._transaction(old, [delete], []), end)
        if body.get("succeeded"):
            [deleted] = body["responses"]
            found = _Found.of({"kvs": deleted["response_delete_range"].get("prev_kvs", ())})
            self._tell_lease("revoke", found.lease if found else 0, end)

    def _create(self, new: bytes, end: float) -> bool:
        granted, _ = self._cluster.ask("lease/grant", {"TTL": LEASE_TTL, "ID": 0}, end)
        lease = int(granted["ID"])
        put = {"request_put": {"key": self._key, "value": _encode(new), "lease": lease}}
        body, is_repeated = self._cluster.ask(
            "kv/txn", self._transaction(None, [put], [self._range]), end
        )
        if body.get("succeeded"):
            return True
        found = _last_range(body)
        if found is not None and found.lease == lease:
            return True  # an attempt without an answer wrote it, and it may have been replaced
        self._tell_lease("revoke", lease, end)  # an attempt that is still under way fails
        if is_repeated:
            raise self._unknown()
        return False

    def _replace(self, old: bytes, new: bytes, end: float) -> bool:
        put = {"request_put": {"key": self._key, "value": _encode(new), "ignore_lease": True}}
        body, is_repeated = self._cluster.ask(
            "kv/txn", self._transaction(old, [put, self._range], [self._range]), end
        )
        found = _last_range(body)
        # An attempt without an answer may have written it.
        is_new = is_repeated and found is not None and found.value == new
        if not body.get("succeeded") and not is_new:
            if is_repeated:
                raise self._unknown()
            return False
        if found is not None:
            self._tell_lease("keepalive", found.lease, end)
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

    def _unknown(self) -> OSError:
        return OSError(
            f"the value may have been written to {self}, and replaced: a member of etcd gave no "
            "answer. Read the value, and try again"
        )

    def _tell_lease(self, what: str, lease: int, end: float) -> None:
        # The value is written, or removed. If this fails, the lease ends after its time.
        with contextlib.suppress(OSError):
            self._cluster.ask(f"lease/{what}", {"ID": lease}, end)


def _last_range(body: dict[str, Any]) -> _Found | None:
    return _Found.of(body["responses"][-1]["response_range"])


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
