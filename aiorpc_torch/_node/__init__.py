"""The node of a worker: its configuration, its peers' membership, named objects."""
