"""How much longer anything may take here than it does on a machine with nothing else to do.

What is to be quick is tested against what it must not wait for: torch's patience, a `stop_timeout`,
a heartbeat that never comes. These are far longer than this. How quick it is, is measured in
`benchmarks`.
"""

SLACK = 8.0  # seconds

BEGUN = 0.5
"""Seconds after which a call in this process has begun: a deadline that is to end it is as long.

Where other processes or the end of a call are waited for too, it is too short.
"""
