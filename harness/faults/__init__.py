"""Deliberate defects: logical ones mutate the reference, boundary ones any system's surroundings."""
