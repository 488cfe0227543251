"""Its place puts `tests/` on the import path, for modules that several kinds of tests share; sets up Hypothesis and the
numerics that every test of bits needs, before anything imports torch."""

import os

from hypothesis import settings

os.environ["ATEN_CPU_CAPABILITY"] = "default"
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("shardproof", deadline=None)  # a busy machine is no failure
settings.load_profile("shardproof")
