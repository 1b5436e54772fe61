"""How fast is it? Each module is a script, `python -m benchmarks.calls`, that prints one table."""

import os

# Here, because OpenMP reads it once, when torch is imported; the children of a world inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
