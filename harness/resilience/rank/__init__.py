"""What runs in the child processes of `harness.resilience`, and alone imports the libraries that are tried."""
