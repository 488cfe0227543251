"""Judges what the arms of a trainer came to: one module an arm, and what they share in `judging`."""
