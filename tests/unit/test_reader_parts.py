"""What readers make of odd checkpoints, part by part.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""
