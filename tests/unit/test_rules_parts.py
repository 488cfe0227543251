"""Rules, at the boundaries of what they say.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""
