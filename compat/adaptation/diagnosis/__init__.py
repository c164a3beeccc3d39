"""What is unlike GPT-2, where it stands in the source, and the numbers that confirm it."""
