"""Its place puts `tests/` on the import path, for modules that several kinds of tests share; sets up Hypothesis."""

from hypothesis import settings

settings.register_profile("shardproof", deadline=None)  # a busy machine is no failure
settings.load_profile("shardproof")
