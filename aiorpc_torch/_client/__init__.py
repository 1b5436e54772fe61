"""The calling side: public functions, connection pool, pending calls and streams."""
