"""What one step of a trainer does, as its ranks measured it, against another way to compute the same."""
