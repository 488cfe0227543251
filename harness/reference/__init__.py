"""The reference: a full sharded optimizer, in lockstep over simulated ranks, that shares no code with the twin."""
