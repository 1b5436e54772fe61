"""Handles of objects and groups, and errors that explain a mistaken use."""
