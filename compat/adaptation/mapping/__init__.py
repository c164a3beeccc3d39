"""Assign the tensors of the checkpoint to parameters, and the taps to nodes of the graph."""
