"""The limit of connections without proof."""

from aiorpc_torch._port.strangers import Strangers


def test_the_oldest_of_the_busiest_host_is_closed() -> None:
    closed: list[str] = []
    strangers = Strangers(3)
    for key, host in (("a", "one"), ("b", "two"), ("c", "two"), ("d", "three"), ("e", "three")):
        strangers.add(key, host, lambda key=key: closed.append(key))
    assert closed == ["b", "a"]
    assert len(strangers) == 3
    strangers.remove("c")
    strangers.remove("unknown")
    strangers.close()
    assert closed == ["b", "a", "d", "e"]
    assert not len(strangers)
