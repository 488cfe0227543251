"""One result in words, for everything that shows results: its title, its effect on training, and lines of text."""
