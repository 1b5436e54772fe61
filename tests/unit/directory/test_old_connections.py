"""Members that connect again, or are replaced: what becomes of their old connections."""

from tests.support.directories import registration, start


def test_a_frozen_process_that_is_replaced() -> None:
    """Its connection is closed, and the end of it is none of the newer process."""
    network, first = start(2)
    network.is_alive = lambda number: number != 1  # type: ignore[method-assign]  # no answer
    second = network.register(registration(1, 2, pid=99))
    network.settle()
    assert second.has_entered
    assert first[1].is_cut
    network.directory.gone(first[1].connection)
    assert not first[0].gone


def test_a_connection_that_is_still_open() -> None:
    """The directory closes it: the process itself knows better."""
    network, [_, second, _] = start()
    old = second.connection
    second.resume()
    network.directory.gone(old)
    network.settle()
    assert second.view == {"w0": 0, "w1": 1, "w2": 2}
