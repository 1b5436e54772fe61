"""The directory of a world, at rank 0, and how workers find it."""
