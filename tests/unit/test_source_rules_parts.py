"""Rules about where values are from, on values made by hand."""
