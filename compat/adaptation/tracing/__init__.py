"""Trace a user's module into a graph that can be run in pieces."""
