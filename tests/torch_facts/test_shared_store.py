"""torch's TCPStore: who shares its server."""

import socket

from torch.distributed import TCPStore


def server(use_libuv: bool = True) -> TCPStore:
    # torch's own socket is an IPv6 one, of which it looks up the names of its clients.
    bare = socket.create_server(("127.0.0.1", 0))
    port, fd = bare.getsockname()[1], bare.detach()
    return TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=fd,
        use_libuv=use_libuv,
    )


def test_a_server_is_shared_in_its_process() -> None:
    """By the number of its port, as long as one store is left."""
    store = server()
    other = TCPStore("127.0.0.1", store.port, None, True, multi_tenant=True, wait_for_workers=False)
    other.set("key", "value")
    other.get("key")  # `set` does not wait
    del store
    assert TCPStore("127.0.0.1", other.port, None, False).get("key") == b"value"
