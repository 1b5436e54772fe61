"""The house rules, read from the source: which room may know which, and how large a room is."""

import ast
import inspect
import re
import statistics
from pathlib import Path

import pytest

import aiorpc_torch

HOUSE = Path(aiorpc_torch.__file__).parent
REPOSITORY = Path(__file__).parents[1]

# From the ground up. A room imports from floors below its own; rooms on one floor do not know each
# other. A new room gets a place here and in the map of aiorpc_torch/__init__.py.
FLOORS = [
    ["errors", "_version", "_seat", "_interfaces", "_environment"],
    ["_devices", "_fences", "_policy"],
    ["_batcher"],
    ["_rounds"],
    ["_window", "_pulse", "_living"],
    ["_exceptions", "_deadline", "_errands", "_rrefs"],
    ["_inbox", "_threads", "_wait", "_states", "_steps", "_scopes", "_interruption"],
    ["_agent", "_bridge", "_tensors"],
    ["_passage"],
    ["_recording"],
    ["_reply"],
    ["_wire"],
    ["_columns", "_exports"],
    ["_message"],
    ["_protocol.frames", "_protocol.handshake", "_protocol.connection_state"],
    ["_protocol.payloads", "_protocol.endpoints", "_protocol.forked"],
    ["_protocol.channel"],
    ["_server.listener", "_server.session"],
    ["_jobs", "_peers"],
    ["_incoming"],
    ["_streams", "_pending"],
    ["_arrivals", "_runner"],
    ["_server.server"],
    ["_doors"],
    ["_client.introduction"],
    ["_client.answers"],
    ["_client.connection"],
    ["_outbox"],
    ["_calling"],
    ["_remote"],
    ["_stacking"],
    ["_stage"],
    ["_answers"],
    ["_admission"],
    ["_tally"],
    ["_body"],
    ["_queue"],
    ["_batched_types"],
    ["_batched"],
    ["_contexts"],
    ["_optimizer"],
    ["autograd"],
    ["_stats"],
    ["_signals"],
    ["_store", "_vigil"],
    ["_rendezvous", "_place"],
    ["_welcome"],
    ["_joining", "_leaving"],
    ["_world"],
    ["_child"],
    ["_crew"],
    ["_local"],
    ["_gate", "_warm"],
    ["_leaks"],
    ["testing"],
    ["__init__"],
]
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}

# Plain Python: what is decided here is tested without a loop, a clock or a process.
PURE = [
    "errors",
    "_version",
    "_seat",
    "_interfaces",
    "_environment",
    "_policy",
    "_batcher",
    "_rounds",
    "_window",
    "_pulse",
    "_living",
    "_exceptions",
    "_deadline",
    "_errands",
    "_protocol.frames",
    "_protocol.handshake",
    "_protocol.connection_state",
]
TIMELESS = [
    "_policy",
    "_batcher",
    "_rounds",
    "_window",
    "_pulse",
    "_protocol.connection_state",
]

MOST_LINES = 500  # of a file
MOST_CODE = 45  # lines of a function, its docstring aside
MEDIAN_CODE = 10  # stays under this

TREES = {
    ".".join(path.relative_to(HOUSE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(HOUSE.rglob("*.py"))
}
SHELLS = [room for room in TREES if room.endswith(".__init__")]  # of the packages inside
for shell in SHELLS:
    del TREES[shell]
rooms = pytest.mark.parametrize("room", TREES)


def imported(room: str) -> set[str]:
    """Every module that `room` imports anywhere in it; ours as `.room` or `.package.room`."""
    found = set()
    *package, _ = room.split(".")
    for node in ast.walk(TREES[room]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                found.add(node.module or "")
                continue
            assert node.level <= len(package) + 1, "beyond the house"
            owner = package[: len(package) + 1 - node.level]
            owner += (node.module or "").split(".") if node.module else []
            if ".".join(owner) in TREES:
                found.add(f".{'.'.join(owner)}")
            else:  # from . import _outbox; from .._protocol import endpoints
                found |= {f".{'.'.join((*owner, alias.name))}" for alias in node.names}
    name = f"{HOUSE.name}."
    return {f".{module.removeprefix(name)}" if name in module else module for module in found}


def neighbours(room: str) -> set[str]:
    return {module[1:] for module in imported(room) if module.startswith(".")}


def top_levels(room: str) -> set[str]:
    return {module.split(".")[0] for module in imported(room) if not module.startswith(".")}


def functions(tree: ast.Module) -> list[tuple[str, int]]:
    """Name and lines of code of every function, methods and inner ones too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            found.append((node.name, lines))
    return found


# ── who knows whom ──────────────────────────────────────────────────────────────────────────────


def test_every_room_has_a_floor() -> None:
    """The list above names the rooms there are, each once."""
    assert sorted(room for floor in FLOORS for room in floor) == sorted(TREES)


def test_the_map_shows_every_room() -> None:
    """The docstring of the package names the rooms in the order of their floors."""
    assert aiorpc_torch.__doc__ is not None
    lines = re.findall(r"^ {4}([\w.]+(?:, [\w.]+)*) {2,}\S", aiorpc_torch.__doc__, re.MULTILINE)
    shown = [room for line in lines for room in line.split(", ")]
    assert shown == [room for floor in FLOORS[:-1] for room in floor]


@rooms
def test_imports_point_down(room: str) -> None:
    """A room knows only rooms on floors below its own, wherever in it the import stands."""
    up = {other for other in neighbours(room) if FLOOR[other] >= FLOOR[room]}
    assert not up, f"{room} is on floor {FLOOR[room]} and imports {up}"


@pytest.mark.parametrize("room", PURE)
def test_the_ground_floor_is_plain_python(room: str) -> None:
    """Neither torch nor anyio, nor a room that knows them."""
    assert not top_levels(room) & {"torch", "anyio"}
    assert neighbours(room) <= set(PURE)


@pytest.mark.parametrize("room", TIMELESS)
def test_time_is_an_argument(room: str) -> None:
    """What is tested in virtual time looks at no clock, no loop and no thread."""
    assert not top_levels(room) & {"asyncio", "time", "datetime", "threading", "sched"}
    assert neighbours(room) <= set(TIMELESS)


# ── how large it is ─────────────────────────────────────────────────────────────────────────────


@rooms
def test_a_file_is_read_in_one_sitting(room: str) -> None:
    """No file is longer than it may be."""
    path = HOUSE.joinpath(*room.split(".")).with_suffix(".py")
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES


@rooms
def test_a_function_is_read_at_a_glance(room: str) -> None:
    """No function has more code than it may have."""
    assert not [(name, lines) for name, lines in functions(TREES[room]) if lines > MOST_CODE]


def test_most_functions_are_short() -> None:
    """The median over the package."""
    lengths = [lines for tree in TREES.values() for _, lines in functions(tree)]
    assert statistics.median(lengths) < MEDIAN_CODE


# ── what it says of itself ──────────────────────────────────────────────────────────────────────


@rooms
def test_every_room_says_what_it_is(room: str) -> None:
    """A module opens with a docstring."""
    assert ast.get_docstring(TREES[room])


@pytest.mark.parametrize("shell", SHELLS)
def test_a_package_inside_is_no_more_than_its_rooms(shell: str) -> None:
    """Its `__init__` has a docstring and no code: who needs a room names it."""
    tree = ast.parse(HOUSE.joinpath(*shell.split(".")).with_suffix(".py").read_text())
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_the_public_names_are_exactly_those_bound() -> None:
    """`__all__` is sorted as it is read, and is what `__init__` imports by name."""
    bound = {
        alias.asname
        for node in TREES["__init__"].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname != "__version__"
    }
    assert len(set(aiorpc_torch.__all__)) == len(aiorpc_torch.__all__)
    assert set(aiorpc_torch.__all__) == bound
    public = {name for name in vars(aiorpc_torch) if not name.startswith("_")}
    rooms = {room for room in TREES if not room.startswith("_")}  # such as `errors`
    assert public - rooms == bound - rooms


@pytest.mark.parametrize("name", aiorpc_torch.__all__)
def test_every_public_name_is_described(name: str) -> None:
    """It has a docstring of its own; torch's RRef is torch's to describe."""
    thing = getattr(aiorpc_torch, name)
    if name == "RRef":
        assert thing.__module__.startswith("torch.")
    elif inspect.isclass(thing):
        assert (vars(thing).get("__doc__") or "").strip()
        assert not (thing.__doc__ or "").startswith(f"{name}("), "a dataclass's own signature"
    else:
        assert (inspect.getdoc(thing) or "").strip()


@pytest.mark.parametrize("name", aiorpc_torch.__all__)
def test_every_public_name_is_in_the_documentation(name: str) -> None:
    """README.md or a page of docs/ mentions it."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    assert re.search(rf"\b{name}\b", text), f"{name} is in none of {len(pages)} pages"
