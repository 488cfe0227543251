"""Runs upstream's own test suites on the emulated device, and compares each test's outcome with a committed list.

An emulation is worth what somebody else's tests say of it. Each system that has an `upstream.toml` among its scenarios
names a repository, a commit of it and suites in it (`declared`). The repository is a clone that the caller has; nothing
of it is kept here. `ranks` runs a suite unmodified, one pytest process a rank, under the plugin of
`shardproof.emulation.pytest_plugin`. `verdicts` compares what came of it with a committed list that says of every test
whether it passes, and of each that does not, what stops it.

    python -m shardproof.suites megatron-core/optimizer --clone megatron-core=../Megatron-LM --ranks 2
"""
