"""The data that the steps of a trainer were given: whose samples they are, of which step, and of which epoch."""
