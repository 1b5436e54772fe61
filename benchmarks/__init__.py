"""How fast is it? Each module is a script that prints one table: `python -m benchmarks.calls`."""

import os

# OpenMP reads it once, when torch is imported. The children of a world inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
