"""Tests of golden files."""
