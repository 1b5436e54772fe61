"""The version. The build reads it, and workers compare it."""

__version__ = "0.1.0"
