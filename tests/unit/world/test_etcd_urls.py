"""URLs of etcd that a worker is given: what is wrong with one is an error before its start."""

import re
import sys
from pathlib import Path

import pytest

import aiorpc_torch as aiorpc
from tests.support.certificates import Authority, openssl


async def enter(url: str) -> None:
    """Start a worker whose world meets there. Nothing listens."""
    async with aiorpc.worker(rank=1, world_size=2, init_method=url, start_timeout=30.0):
        pass


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("etcd:a:1/b", "etcd://host:port/name"),
        ("http://a:1/b", "etcd://host:port/name"),
        ("etcd:///b", "etcd://host:port/name"),
        ("etcd://a:1", "no name after its hosts: write etcd://host:port/name"),
        ("etcd://a:1/", "no name"),
        ("etcd://a/b", "must be host:port"),
        ("etcd://a:1,/b", "must be host:port"),
        ("etcd://a:0/b", "must be host:port"),
        ("etcd://a:65536/b", "must be host:port"),
        ("etcd://a:²/b", "must be host:port"),
        ("etcd://:1/b", "must be host:port"),
        ("etcd://::1:1/b", "brackets"),
        ("etcd://[a]:1/b", "brackets"),
        ("etcd://me:secret/@a:1/b", "%2F for a '/'"),
        ("etcd://me:secret?@a:1/b", "no name"),
        ("etcd://me:secret#@a:1/b", "%23"),
        ("etcd://@a:1/b", "no user"),
        ("etcd://:secret@a:1/b", "no user"),
        ("etcd://me@a:1/b", "without a password"),
        ("etcd://me:@a:1/b", "without a password"),
        ("etcd://a:1/b?timeout=1", "may have ca="),
        ("etcd://a:1/b?ca", "may have ca="),
        ("etcd://a:1/b?ca=", "may have ca="),
        ("etcd://a:1/b?ca=a&ca=b", "may have ca="),
        ("etcd://a:1/b?tls=0", "tls= in the URL must be 1"),
        ("etcd://a:1/b?cert=a", "both cert= and key="),
        ("etcd://a:1/b?ca=/no/file", "ca=/no/file of the URL cannot be used: No such file"),
        ("etcd://a:1/b?cert=/no/cert&key=/no/key", "cert=/no/cert of the URL cannot be used"),
    ],
)
async def test_a_url_that_is_malformed(
    url: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to write, without a part of the password."""
    monkeypatch.delenv("AIORPC_TORCH_ETCD_PASSWORD", raising=False)
    with pytest.raises(ValueError, match=re.escape(text)) as refused:
        await enter(url)
    assert "secret" not in str(refused.value)


async def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    """The error names the file."""
    first, second = Authority(tmp_path), Authority(tmp_path, "another one")
    cert, key, ca = first.files()
    other = second.files()[1].replace(" ", "%20")
    encrypted = str(tmp_path / "encrypted.key")
    openssl("ec", "-in", key, "-out", encrypted, "-aes128", "-passout", "pass:secret")
    for query, text in {
        f"ca={key}": "ca=",
        f"cert={cert}&key={other}": "key values mismatch",
        f"cert={cert}&key={encrypted}": "encrypted",
        f"cert={ca}&key={cert}": "cannot be used",
    }.items():
        with pytest.raises(ValueError, match=text):
            await enter(f"etcd://a:1/b?{query}")


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'aiorpc_torch[etcd]'")):
        await enter("etcd://a:1/b")
