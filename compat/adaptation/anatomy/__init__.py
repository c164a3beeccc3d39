"""Recognise which node of a graph is which part of a GPT-2, by data flow."""
