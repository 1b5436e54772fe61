"""The endpoint of this process: the current node, and what peers call there."""
