"""torch's TCPStore: who shares its server."""

from torch.distributed import TCPStore

from tests.support.store_servers import server


def test_a_server_is_shared_in_its_process() -> None:
    """By the number of its port, as long as one store is left."""
    store = server()
    other = TCPStore("127.0.0.1", store.port, None, True, multi_tenant=True, wait_for_workers=False)
    other.set("key", "value")
    other.get("key")  # `set` does not wait
    del store
    assert TCPStore("127.0.0.1", other.port, None, False).get("key") == b"value"
