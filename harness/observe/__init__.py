"""Observations: the state of every rank as raw bytes, and their assembly into logical tensors."""
