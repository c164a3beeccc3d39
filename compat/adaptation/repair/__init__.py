"""Edits of a user's source that make a model compatible, each proved before it is written."""
