"""What must be: the unsharded twin and the contracts of each system."""
