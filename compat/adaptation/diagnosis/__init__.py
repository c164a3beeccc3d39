"""Deviations from GPT-2: how they are found, confirmed and reported with the line and the fix."""
