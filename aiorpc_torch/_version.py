"""Which version this is. Read by the build, and told to peers."""

__version__ = "0.1.0"
