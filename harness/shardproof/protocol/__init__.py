"""The interface between the core and a system under test: the declaration of a system, the scenarios it accepts, its
releases, and the registry that finds it."""
