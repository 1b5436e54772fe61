"""The tutorial's step for two machines, on two."""

from pathlib import Path

from tests.support.network_namespaces import ADDRESSES, Machine, machines as machines
from tests.support.pages import blocks, run_together, saved

PAGE = "docs/tutorial/torchrun.md"


def test_two_machines_differ_in_the_address_alone(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    """As the page says: the first machine's address in both commands; the same is printed."""
    commands = [
        machine.inside(*(word.replace("127.0.0.1", ADDRESSES[0]) for word in command))
        for machine, command in zip(machines, saved(PAGE, tmp_path), strict=True)
    ]
    assert run_together(commands, tmp_path) == [text for _, text in blocks(PAGE, "text")]
