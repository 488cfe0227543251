"""All that the core may ask of a system: its declaration, what it accepts, its releases, and how it is found."""
