"""The same programs in plain torch RPC: what ours are compared with.

In their strongest form, and with the originals' mistakes put right. `docs/programs/` sets them
beside ours.
"""
