"""What child processes import for trials of the reference's files (`stacks`); its scenarios have no ranks."""
