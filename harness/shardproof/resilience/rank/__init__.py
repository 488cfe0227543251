"""What runs in the child processes of `shardproof.resilience`, and alone imports the libraries that are tried."""
