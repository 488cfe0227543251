"""How explanations are ranked and worded, and what their nouns say.
Each test is here because a change of the code went unnoticed without it (`docs/mutation.md`)."""
