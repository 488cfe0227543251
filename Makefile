# What a contributor does, one word each. Every target works on a fresh machine: it makes .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= $(shell nproc)

.PHONY: run test lint bench canaries nightly gpu report-sample clean

run: $(STAMP)  ## the smoke scenarios on the reference and on FSDP2 + DCP, then the report
	$(BIN)/shardproof run smoke --out reports/smoke

test: $(STAMP)  ## lint, types and all fast tests, in parallel, with coverage of harness/
	$(MAKE) lint
	$(BIN)/coverage erase
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(BIN)/pytest -n $(JOBS) -m "not nightly" --cov=harness --cov-branch --cov-report=term:skip-covered

lint: $(STAMP)  ## ruff (lint and format) and the strict type check
	$(BIN)/ruff check harness scenarios tests benchmarks
	$(BIN)/ruff format --check harness scenarios tests benchmarks
	$(BIN)/mypy

canaries: $(STAMP)  ## every fault and every comparison that must be noticed; fails if one is not
	$(BIN)/shardproof faults --out reports/canaries

nightly: $(STAMP)  ## the nightly matrix and the slow tests
	$(BIN)/shardproof run nightly nightly_fsdp --out reports/nightly
	$(BIN)/pytest -n $(JOBS) -m nightly

GPU_SET := gpu regressions/megatron-core-2777 regressions/megatron-core-3949 regressions/torch-fsdp2-164929

gpu: $(STAMP)  ## on a machine with a GPU: its tests, the GPU set on CPU and GPU, and the record of it in docs/gpu.md
	$(BIN)/pytest -m gpu tests/gpu
	-$(BIN)/shardproof run $(GPU_SET) --device cpu --out reports/gpu-cpu --json reports/gpu-cpu/run.json
	-$(BIN)/shardproof run $(GPU_SET) --device cuda --deadline-s 180 --out reports/gpu-cuda --json reports/gpu-cuda/run.json
	$(BIN)/python -m harness.report.gpu_record reports/gpu-cpu/run.json reports/gpu-cuda/run.json >> docs/gpu.md

bench: $(STAMP)  ## speed, side by side in one run
	$(BIN)/python -m benchmarks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
