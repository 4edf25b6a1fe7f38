# Everything runs in virtual environments that this file creates and repairs; see `make help`.
# pip's own settings apply: to install torch without CUDA, PIP_EXTRA_INDEX_URL can name an index of CPU builds.

PYTHON ?= python3
PYTEST_ARGS ?=
SERVING_ARGS ?=
PYTEST_WORKERS ?= 2

VENV := .venv
OLDEST_VENV := .venv-oldest
NEWEST_VENV := .venv-newest
SERVING_VENV := .venv-serving
# The oldest transformers that pyproject.toml allows, and a huggingface_hub of its time.
OLDEST := transformers==5.17.0 huggingface_hub==1.33.0

# One torch thread per worker: more would fight over the cores.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest --numprocesses $(PYTEST_WORKERS) --dist worksteal $(PYTEST_ARGS)

NUMERICAL := exactness or verification or golden

# $(call install,venv,extra,constraints): installs this project into a virtual environment and stamps the target.
# `.unfinished` remains if the install was interrupted. pip would take packages that it wrote in part for installed, so
# the next run starts again; also if the interpreter no longer exists. pip's own cache keeps the downloads.
define install
@if [ -e $(1)/.unfinished ] || ! $(1)/bin/python -c pass 2>/dev/null; then rm -rf $(1); fi
@mkdir -p $(1) && touch $(1)/.unfinished
@[ -x $(1)/bin/python ] || $(PYTHON) -m venv $(1)
@echo 'Installing .[$(2)] into $(1); the first time this takes minutes.'
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(3) --editable '.[$(2)]'
@touch $@ && rm $(1)/.unfinished
endef

# A stamp does not show that an environment is unfinished or without an interpreter: then it is made again.
SOUND = $(shell [ ! -e $(1)/.unfinished ] && $(1)/bin/python -c 'print("sound")' 2>/dev/null)
$(VENV)/.demo $(VENV)/.dev: $(if $(call SOUND,$(VENV)),,FORCE)
$(OLDEST_VENV)/.dev: $(if $(call SOUND,$(OLDEST_VENV)),,FORCE)

# The `dev` extra holds all of `demo`.
DEMO_STAMP := $(firstword $(wildcard $(VENV)/.dev) $(VENV)/.demo)

BEFORE_3_11 = $(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 11))'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all test-numerics test-mutations test-serving test-oldest test-newest notebook docs lint types format clean FORCE

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO_STAMP) ## Install into .venv and compare ways of drafting on the bundled model
	$(VENV)/bin/python examples/quickstart.py

test: $(VENV)/.dev ## Install into .venv and run the tests and doctests (PYTEST_ARGS="-k tree" to choose)
	$(call PYTEST,$(VENV))

test-all: $(VENV)/.dev ## Run the tests with all combinations of parameters
	$(call PYTEST,$(VENV)) --exhaustive

test-numerics: test-numerics-default test-numerics-avx2 ## Run the tests that compare numbers, with the kernels of other processors

test-numerics-%: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=$* $(call PYTEST,$(VENV)) -k '$(NUMERICAL)'

test-mutations: $(VENV)/.dev ## Change a copy of the source, one defect at a time, and check that a test fails
	$(VENV)/bin/python tests/mutations.py

test-serving: $(VENV)/.dev $(SERVING_VENV)/.ready ## Serve the assistant with its drafters in vLLM (CPU), in .venv-serving, and compare
	$(VENV)/bin/python examples/serving/measure.py --engine $(SERVING_VENV)/bin/vllm $(SERVING_ARGS)

test-oldest: $(OLDEST_VENV)/.dev ## Run the tests in .venv-oldest, with the oldest supported transformers
	$(call PYTEST,$(OLDEST_VENV))

test-newest: ## Run the tests in .venv-newest with the newest packages, as pip gives them to a user, after README's lines
	@rm -f $(NEWEST_VENV)/.dev
	$(MAKE) --no-print-directory $(NEWEST_VENV)/.dev
	$(NEWEST_VENV)/bin/python tests/newest.py
	$(call PYTEST,$(NEWEST_VENV))

notebook: $(VENV)/.dev ## Execute examples/quickstart.ipynb on the small assistant (Python 3.11 and later)
	@if $(BEFORE_3_11); then echo 'The notebook is not executed: what runs it needs Python 3.11.'; \
	else mkdir -p build && $(VENV)/bin/jupyter execute --output=$(CURDIR)/build/quickstart.ipynb examples/quickstart.ipynb; fi

docs: $(VENV)/.dev ## Build the documents into build/site (Python 3.11 and later); a broken link is an error
	@if $(BEFORE_3_11); then echo 'The documents are not built: their builder needs Python 3.11.'; \
	else NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet; fi

lint: $(VENV)/.dev ## Check style and format
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m ruff format --check

types: $(VENV)/.dev ## Check types
	$(VENV)/bin/python -m mypy

format: $(VENV)/.dev ## Correct what the linter and the formatter can
	$(VENV)/bin/python -m ruff check --fix
	$(VENV)/bin/python -m ruff format

clean: ## Remove the environments, caches and builds
	rm -rf $(VENV) $(OLDEST_VENV) $(NEWEST_VENV) $(SERVING_VENV) $(OLDEST_VENV)-constraints.txt build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,$(VENV),demo,constraints.txt)

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,$(VENV),dev,constraints.txt)

$(OLDEST_VENV)/.dev: pyproject.toml $(OLDEST_VENV)-constraints.txt
	$(call install,$(OLDEST_VENV),dev,$(OLDEST_VENV)-constraints.txt)

$(NEWEST_VENV)/.dev: pyproject.toml
	$(call install,$(NEWEST_VENV),dev,/dev/null --upgrade --upgrade-strategy eager)

# An engine in an environment of its own; its list of packages is complete, so pip installs no dependencies.
$(SERVING_VENV)/.ready: examples/serving/requirements.txt
	rm -rf $(SERVING_VENV)
	$(PYTHON) -m venv $(SERVING_VENV)
	@echo 'Installing vLLM into $(SERVING_VENV); this takes minutes.'
	$(SERVING_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(SERVING_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

$(OLDEST_VENV)-constraints.txt: constraints.txt Makefile
	grep -v -e '^transformers==' -e '^huggingface_hub==' constraints.txt > $@
	printf '%s\n' $(OLDEST) >> $@
