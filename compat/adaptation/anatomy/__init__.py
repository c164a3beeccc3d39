"""Which node of the graph is which part of a GPT-2, by data flow."""
