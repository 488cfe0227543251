"""Rules about gradients, on values made by hand."""
