"""Commands that look further into failures: shrink, explore, sweep over releases, bisect, and the table of cures."""
