"""The context of a call: what travels with it, and who is told of it."""
