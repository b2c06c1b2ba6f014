# Two commands do all the set-up on a fresh Debian 12 as root: `make run` and `make test`.
# Each may be repeated, and goes on where it was interrupted.

VENV := .venv
export GREENROOM_VENV := $(VENV)
BIN := $(VENV)/bin
SOURCES := src tests bench

.PHONY: help setup dev run test lint format bench faults lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what Greenroom needs (Debian packages, locked Python packages)
	@scripts/setup.sh runtime

dev: ## the same and what tests and lint need
	@scripts/setup.sh dev

run: setup ## the main job: start the platform, one sandbox, one command, stop; each step with its time
	@$(BIN)/greenroom demo $(DEMO_ARGS)

test: dev ## everything that a change must not break (boots real microVMs; as root)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: dev ## ruff, mypy --strict, the floors of the architecture
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: dev ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

bench: setup ## measure restores and claims on this machine; JSON under bench-results/
	@mkdir -p bench-results
	@$(BIN)/greenroom bench restore --json bench-results/restore.json
	@$(BIN)/greenroom bench claim --json bench-results/claim.json

faults: setup ## kill the node 100 times under load and look for what is lost, doubled or left (about 15 minutes)
	@$(BIN)/greenroom bench faults --kills 100 --out bench-results/faults

lock: dev ## write the lock files anew from pyproject.toml
	@$(BIN)/python -m pip install -q uv
	@$(BIN)/uv pip compile -q --upgrade --no-emit-index-url --no-emit-find-links --generate-hashes --no-header \
		--no-annotate --python-version 3.11 pyproject.toml -o requirements/runtime.lock
	@$(BIN)/uv pip compile -q --upgrade --no-emit-index-url --no-emit-find-links --generate-hashes --no-header \
		--no-annotate --python-version 3.11 --extra dev -c requirements/runtime.lock pyproject.toml \
		-o requirements/dev.lock

clean: ## remove what `make setup` made in this folder (images stay in the cache)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
