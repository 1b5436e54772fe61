"""Where there is no device, the tests of this folder are skipped. They are plain functions."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch
