"""What a trainer's run leaves for people: the text of the command line, and a script without shardproof."""
