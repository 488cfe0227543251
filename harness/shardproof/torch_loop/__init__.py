"""A plain torch training loop on one rank, with named hooks, for systems that are one; and its random generators."""
