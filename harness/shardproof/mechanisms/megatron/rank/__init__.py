"""The half of Megatron's mechanisms that runs on ranks, with Megatron-Core and torch loaded."""
