"""What the statements of a trainer's own files read, made and decided, against those of another run."""
