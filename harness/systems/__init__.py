"""The systems under test behind one protocol."""
