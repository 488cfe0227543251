"""What a warm worker looks up about the class that `shardproof optimizer` is asked about."""
