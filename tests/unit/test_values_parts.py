"""What a parsed pickle stands for, node by node, and what is refused.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""
