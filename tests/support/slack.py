"""How much longer anything may take here than it does on a machine with nothing else to do.

What is to be quick is tested against what it must not wait for: torch's patience, a `stop_timeout`,
a heartbeat that never comes. These are far longer than this. How quick it is, is measured in
`benchmarks`.
"""

SLACK = 8.0  # seconds
