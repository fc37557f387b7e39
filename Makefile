# make help lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := .venv/bin
CONFIG ?= configs/demo.yaml
HF_MODEL := models/smollm2-hf
NVFP4_MODEL := models/smollm2-nvfp4
# Extra words: make test ARGS="-k loader", make demo ARGS="train.steps=5"
ARGS ?=

.PHONY: help setup demo test checks lint types imports shells image-lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed ## make .venv with the pinned dependencies (about 3 GB the first time)

.venv/installed: pyproject.toml constraints.txt .python-version launch/env.sh
	@bash launch/env.sh setup
	@touch $@

demo: setup $(NVFP4_MODEL)/config.json ## train a real small model end to end on this machine's CPU
	$(BIN)/megatron-qerl train $(CONFIG) --overwrite $(ARGS)

$(HF_MODEL)/config.json: | setup
	$(BIN)/python launch/demo_model.py --output $(HF_MODEL)

$(NVFP4_MODEL)/config.json: | setup $(HF_MODEL)/config.json
	$(BIN)/megatron-qerl quantize configs/quantize_demo.yaml

test: setup ## run the tests
	$(BIN)/python -m pytest --durations=15 $(ARGS)

checks: lint types imports shells image-lint ## all static checks; make -k checks goes on after a failure

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

shells: setup
	$(BIN)/shellcheck $$(find . \( -name '.?*' -o -name models -o -name runs \) -prune -o -name '*.sh' -print) .ci/run

image-lint: setup
	$(BIN)/hadolint Dockerfile

clean: ## remove the environment and caches; models and runs stay
	rm -rf .venv .venv-bootstrap .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist *.egg-info
	find megatron_qerl te_extensions tests launch -name __pycache__ -type d -prune -exec rm -rf {} +
