"""The command line: what its words mean, and one module for each family of commands."""
