"""The viewer of `python -m aiorpc_torch top`: probes, a pure model, and the terminal."""
