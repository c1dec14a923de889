# Everything a person or CI runs. One virtual environment per incompatible group; so far there is one.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test check bench chaos soak clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

install: $(VENV)/.installed ## Install Penstock and its development tools into .venv

demo: install ## See it work: unmodified agents, a local model, the recorded tape (no network, no key)
	@$(BIN)/python -m gateway.demo

test: install ## Run every test
	$(BIN)/python -m pytest -n 2 --dist loadgroup

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
	rm -rf $(VENV) bench/out bench/.build bench/node_modules .pytest_cache .ruff_cache .hypothesis
