"""Known issues of the libraries under test, the cures that take them away, and where upstream speaks of them."""
