"""Programs as coroutines. Each runs alone: `python -m examples.cartpole`."""
