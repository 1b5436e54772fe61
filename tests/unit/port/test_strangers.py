"""The limit of connections without proof."""

from aiorpc_torch._port.strangers import LEFT, TOO_MANY, Strangers


def test_the_oldest_of_the_busiest_host_is_closed() -> None:
    closed: list[str] = []
    strangers = Strangers(3)
    for key, host in (("a", "one"), ("b", "two"), ("c", "two"), ("d", "three"), ("e", "three")):
        strangers.add(key, host, lambda why, key=key: closed.append(f"{key}: {why}"))
    assert closed == [f"{each}: {TOO_MANY}" for each in "ba"]
    assert len(strangers) == 3
    strangers.remove("c")
    strangers.remove("unknown")
    strangers.close()
    assert closed[2:] == [f"{each}: {LEFT}" for each in "de"]
    assert not len(strangers)
