# `make train` and `make test` need nothing but a Python 3.11; the rest is in README.md.

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
TRAIN_FLAGS ?=
BENCH_FLAGS ?=
E2E_FLAGS ?=
reports = --junitxml=runs/e2e-$(1).xml --optstream-report=runs/e2e-$(1).html

.PHONY: help venv venv-megatron-0.19 train test lint unit nightly bench
.PHONY: e2e e2e-megatron-0.19

help:
	@echo 'make train   train a small GPT, resident and streamed, and compare every bit (TRAIN_FLAGS=...)'
	@echo 'make test    lint, import contracts and the unit tests'
	@echo 'make e2e     the full Megatron path with megatron-core 0.16, on GPUs or simulated (E2E_FLAGS=...)'
	@echo 'make e2e-megatron-0.19   the same with megatron-core 0.19, on Python 3.12'
	@echo 'make nightly the whole argument matrix and the long random runs'
	@echo 'make bench   the table of the README (BENCH_FLAGS=...)'
	@echo 'make lint    ruff and the import contracts alone'

venv:
	@.ci/venv 3.11 $(VENV)

train: venv
	$(BIN)/optstream train $(TRAIN_FLAGS)

test: lint unit

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

unit: venv
	$(PYTEST) -m unit -n auto

e2e: venv
	@mkdir -p runs
	$(PYTEST) -m e2e -n auto $(call reports,megatron-0.16) $(E2E_FLAGS)

venv-megatron-0.19:
	@.ci/venv 3.12 .venv312

e2e-megatron-0.19: venv-megatron-0.19
	@mkdir -p runs
	.venv312/bin/python -m pytest -m e2e -n auto $(call reports,megatron-0.19) $(E2E_FLAGS)

nightly: venv
	OPTSTREAM_HYPOTHESIS_PROFILE=nightly $(PYTEST) -m nightly -n auto

bench: venv
	$(BIN)/optstream bench step --markdown $(BENCH_FLAGS)
