# What a contributor does, one word each. Every target works on a fresh machine: it makes an environment first.
#
#   make run                        Python 3.11 to 3.13 as `python3`, in .venv
#   PYTHON=python3.13 make run      another Python, in an environment of its own, .venv-3.13
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cpu      the small CPU build of torch
#   make run VENV= PYTHON=/opt/mine/bin/python                     as it is installed there: nothing is installed
ifeq ($(origin PYTHON),undefined)
VENV   ?= .venv
else
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
$(if $(VERSION),,$(error PYTHON=$(PYTHON) does not run; give the name or the path of a Python from 3.11 to 3.13))
VENV   ?= .venv-$(VERSION)
endif
PYTHON ?= python3
PY     := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
STAMP  := $(if $(VENV),$(VENV)/.installed)
JOBS   ?= $(shell echo $$(($$(nproc) + 1)))
SPREAD := -n $(JOBS) --dist loadgroup --no-loadscope-reorder  # as collected: files with few but long tests are not last
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

ifeq ($(VENV),)
export PYTHONPATH := $(CURDIR)/harness$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same modules

.PHONY: run test fast coverage lint docs sample bench canaries nightly gpu clean

run: $(STAMP)  ## the smoke scenarios on the reference and on FSDP2 + DCP, then the report
	$(PY) -m shardproof run smoke --out reports/smoke

test: $(STAMP)  ## lint, types and all fast tests, side by side
	$(MAKE) -j2 lint fast

fast: $(STAMP)  ## all fast tests, in parallel
	$(PY) -m pytest $(SPREAD) -m "not nightly"

coverage: $(STAMP)  ## the same tests with coverage of harness/shardproof/, which costs two thirds more CPU
	$(PY) -m coverage erase
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(PY) -m pytest $(SPREAD) -m "not nightly" --cov=shardproof --cov-branch --cov-report=term:skip-covered

lint: $(STAMP)  ## ruff (lint and format) and the strict type check
	$(PY) -m ruff check harness scenarios tests benchmarks docs/site docs/written
	$(PY) -m ruff format --check harness scenarios tests benchmarks docs/site docs/written
	$(PY) -m mypy

canaries: $(STAMP)  ## every fault and every comparison that must be noticed; fails if one is not
	$(PY) -m shardproof faults --out reports/canaries

NEWEST_TORCH = $(shell sed -n 's/^torch==//p' constraints-newest.txt)

SHARD ?= tonight/2

nightly: $(STAMP)  ## tonight's half of the nightly matrix, and the slow tests; SHARD=1/1 for the whole matrix
	$(if $(VENV),$(PIP) -e '.[ray]')
	$(PY) -m shardproof run nightly --shard $(SHARD) --out reports/nightly
	$(PY) -m shardproof run nightly --system torch-fsdp2 --torch "<=$(NEWEST_TORCH)" --out reports/nightly-newest-torch
	$(PY) -m pytest $(SPREAD) -m nightly
	SHARDPROOF_EFFORT=10 $(PY) -m pytest $(SPREAD) -m "hypothesis and not nightly"
	$(PY) -m shardproof trainer scenarios/trainers/*.py --strength 2 --cured --out reports/nightly-trainers

GPU_SET := gpu regressions/megatron-core-2777 regressions/megatron-core-3949 regressions/torch-fsdp2-164929

gpu: $(STAMP)  ## on a machine with a GPU: its tests, the GPU set on CPU and GPU, and the record of it in docs/gpu.md
	$(PY) -m pytest -m gpu tests/gpu
	-$(PY) -m shardproof run $(GPU_SET) --device cpu --out reports/gpu-cpu --json reports/gpu-cpu/run.json
	-$(PY) -m shardproof run $(GPU_SET) --device cuda --deadline-s 180 --out reports/gpu-cuda --json reports/gpu-cuda/run.json
	$(PY) -m docs.written.gpu_record reports/gpu-cpu/run.json reports/gpu-cuda/run.json >> docs/gpu.md

docs: $(STAMP)  ## the documentation site, in build/site; a broken link or a page outside of the navigation ends it
	$(PY) -m sphinx -q -W --keep-going -c docs/site -d build/site-read docs build/site

sample: $(STAMP)  ## the report that is kept in git, written anew
	$(PY) -m shardproof run smoke --system torch-fsdp2 --out reports/smoke-of-the-sample
	$(PY) -m tests.sample reports/smoke-of-the-sample

bench: $(STAMP)  ## speed, side by side in one run
	$(PY) -m benchmarks

ifneq ($(VENV),)
$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) -e '.[test,browser,docs]'
	touch $@
endif

clean:
	rm -rf .venv .venv-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
