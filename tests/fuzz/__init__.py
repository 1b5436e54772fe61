"""Fuzzing of what reads the bytes of a peer. (tests/README.md)"""
