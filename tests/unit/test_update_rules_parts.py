"""Rules about updates, on values made by hand."""
