"""From somebody's module to a graph that can be run in pieces."""
