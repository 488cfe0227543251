"""The half of FSDP2's mechanisms that runs on ranks, with torch loaded."""
