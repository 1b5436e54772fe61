"""A server of torch's TCPStore on a free port."""

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
