"""The table of states in docs/design.md: `python -m tests.support.peer_table` writes it."""

from pathlib import Path

from aiorpc_torch._peers.peers import RULES, Duty, Event, State

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
START, END = "<!-- peers -->\n", "\n<!-- end -->"


def table() -> str:
    """Return the states, the events with what follows, and the duties, as the page has them."""
    states = [f"| {each.name} | {each.value} |" for each in State]
    heads = " | ".join(each.name for each in State)
    events = [
        f"| {each.name}: {each.value} | {' | '.join(_cell(each, state) for state in State)} |"
        for each in Event
    ]
    duties = [f"| {each.name} | {each.value} |" for each in Duty]
    tables = [
        ["| state | the process is |", "|---|---|", *states],
        [f"| event | {heads} |", f"|---|{'---|' * len(State)}", *events],
        ["| duty | what the driver does |", "|---|---|", *duties],
    ]
    return "\n".join("\n".join(each) + "\n" for each in tables)


def _cell(event: Event, state: State) -> str:
    after, duties = RULES[event].get(state, (state, ()))
    names = ", ".join(each.name for each in duties)
    return " ".join(([] if after is state else [f"→ {after.name}"]) + ([names] if names else []))


def page() -> str:
    """Return the page with the table as it is now."""
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    return before + START + "\n" + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
