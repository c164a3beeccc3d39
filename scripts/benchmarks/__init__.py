"""What bench.py runs: one file for each command, and what they share."""
