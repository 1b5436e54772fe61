"""The notebook runs from top to bottom, and each cell prints what it should."""

import json
import sys

import pytest

from tests.support.example_programs import PATIENCE, ROOT, run_line

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("cloudpickle")

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"

PRINTED = """\
outputs: [3.0, 5.0, 7.0, 9.0]
batches: [8, 8]
sums: [11, 21]
processes: 3
a lambda: 3.0
far: 7
an exception: unsupported operand type(s) for +=: 'int' and 'str'
the world has ended
doubled: 42
counted: [0, 1, 2, 3]
"""

RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=None).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        assert output.output_type == "stream", output
        # A busy machine may take so long to start that a world says for whom it waits.
        if output.name == "stdout" or "waits for rank" not in output.text:
            print(output.text, end="")
"""


CELLS = """
import nbclient, nbformat
from nbformat.v4 import new_code_cell, new_notebook
cells = [
    "import aiorpc_torch as aiorpc",
    "me = await aiorpc.local_world(0).__aenter__()",
    "print(await aiorpc.call(me.name, abs, -1))",
    "await me.world.__aexit__(None, None, None)",
]
order = [0, 1, 1, 2, 3, 1, 2]
notebook = new_notebook(cells=[new_code_cell(cells[each]) for each in order])
nbclient.NotebookClient(notebook, timeout=None, allow_errors=True).execute()
for cell in notebook.cells:
    for output in cell.outputs:
        if output.output_type == "stream":
            print(output.text, end="")
        elif output.output_type == "error":
            print(output.ename, output.evalue)
"""


@pytest.mark.slow
@pytest.mark.promise("worlds.open")
def test_a_cell_that_opens_a_world_runs_twice() -> None:
    """The world of the first time lives; the error says how to leave it. The kernel ends in it."""
    refused, *printed = run_line([sys.executable, "-c", CELLS], PATIENCE).splitlines()
    assert refused.startswith("RuntimeError this process is in a world already: leave it first")
    assert "`await me.world.__aexit__(None, None, None)`" in refused
    assert printed == ["1", "1"]


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    """A fresh kernel runs all cells; nothing is printed but these lines."""
    line = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    assert run_line(line, PATIENCE) == PRINTED


def test_the_notebook_is_stored_without_outputs() -> None:
    """A difference in git is then a difference in the cells."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
