"""shardproof: bitwise correctness testing and fault injection for sharded training state."""

__version__ = "0.1.0"
