# Two commands do all the set-up on a fresh Debian 12 as root: `make run` and `make test`.
# Each may be repeated, and goes on where it was interrupted.

VENV := .venv
export GREENROOM_VENV := $(VENV)
BIN := $(VENV)/bin
# Two processes: a test of microVMs mostly waits for one emulated CPU.
WORKERS ?= 2
SOURCES := src tests bench compat scripts

.PHONY: help setup dev run test test-long lint format bench faults compat docs lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install what Greenroom needs (Debian packages, locked Python packages)
	@scripts/setup.sh runtime

dev: ## the same and what tests and lint need
	@scripts/setup.sh dev

run: setup ## the main job: start the platform, one sandbox, one command, stop; each step with its time
	@$(BIN)/greenroom demo $(DEMO_ARGS)

test: dev ## everything that a change must not break (boots real microVMs; as root)
	@$(BIN)/python -m pytest -m "not long" -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-long: dev ## what takes longer: whole benchmarks and fault runs, kills between any two steps
	@$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

lint: dev ## ruff, mypy --strict, the floors of the architecture
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@! git grep -nE '^(<<<<<<<|>>>>>>>) ' || { echo "a merge was left half-way in the files above"; exit 1; }

format: dev ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

docs: dev ## write the README's table of supported calls anew
	@$(BIN)/python scripts/tables.py

RESULTS := bench-results
ifdef QUICK
RESTORE_ARGS ?= --count 2 --rounds 1 --starts 1
CLAIM_ARGS ?= --count 2 --rounds 1
KUBE_ARGS ?= --quick
LIFECYCLE_ARGS ?= --rounds 1 --dirty 16 --forks 2
EXEC_ARGS ?= --count 50 --file 16 --fetches 1
PLATFORM_ARGS ?= --minutes 0.1
DENSITY_ARGS ?= --count 20 --claim 2 --alive 2
LOOP_ARGS ?= --count 4 --threads 1,2
SLOW_ARGS ?= --count 2 --mib-per-second 200
REPORT_ARGS ?= --out $(RESULTS)/quick
endif

# A benchmark that misses a target ends with status 3, and one that this machine cannot run with another: neither
# keeps the others from running. What was not measured is said on the page.
bench: ## measure all there is (about 40 minutes; QUICK=1 for a look), JSON in bench-results/, then docs/performance.md
	@scripts/setup.sh bench
	@mkdir -p $(RESULTS)
	@cd $(RESULTS) && rm -f restore.json claim.json kube.json lifecycle.json exec.json platform.json density.json bare_loop.json slow_medium.json
	@echo 'bench 1/9: restore'
	-@$(BIN)/greenroom bench restore $(RESTORE_ARGS) --json $(RESULTS)/restore.json
	@echo 'bench 2/9: claim'
	-@$(BIN)/greenroom bench claim $(CLAIM_ARGS) --json $(RESULTS)/claim.json
	@echo 'bench 3/9: kube'
	-@$(BIN)/greenroom bench kube $(KUBE_ARGS) --json $(RESULTS)/kube.json
	@echo 'bench 4/9: lifecycle'
	-@$(BIN)/greenroom bench lifecycle $(LIFECYCLE_ARGS) --json $(RESULTS)/lifecycle.json
	@echo 'bench 5/9: exec'
	-@$(BIN)/greenroom bench exec $(EXEC_ARGS) --json $(RESULTS)/exec.json
	@echo 'bench 6/9: platform'
	-@$(BIN)/greenroom bench platform $(PLATFORM_ARGS) --json $(RESULTS)/platform.json
	@echo 'bench 7/9: density'
	-@$(BIN)/greenroom bench density $(DENSITY_ARGS) --json $(RESULTS)/density.json
	@echo 'bench 8/9: the bare loop'
	-@$(BIN)/python bench/bare_loop.py $(LOOP_ARGS) --json >$(RESULTS)/bare_loop.json
	@echo 'bench 9/9: a slow medium'
	-@$(BIN)/python bench/slow_medium.py $(SLOW_ARGS) --json >$(RESULTS)/slow_medium.json
	@$(BIN)/greenroom bench report --results $(RESULTS) $(REPORT_ARGS)

faults: setup ## kill the node 100 times under load and look for what is lost, doubled or left (about 15 minutes)
	@$(BIN)/greenroom bench faults --kills 100 --out bench-results/faults

compat: dev ## the E2B SDK's own tests, SDK=PATH of its checkout; writes docs/compatibility.md (about ten minutes)
	@test -n "$(SDK)" || { echo 'make compat SDK=PATH: a checkout of github.com/e2b-dev/E2B is needed' >&2; exit 2; }
	@mkdir -p $(RESULTS)
	@$(BIN)/python compat/run.py --sdk "$(SDK)" --also 2.63.0 --out docs/compatibility.md \
		--json $(RESULTS)/compat.json $(COMPAT_ARGS)

lock: dev ## write the lock files anew from pyproject.toml
	@$(BIN)/python -m pip install -q uv
	@$(BIN)/uv pip compile -q --upgrade --no-emit-index-url --no-emit-find-links --generate-hashes --no-header \
		--no-annotate --python-version 3.11 pyproject.toml -o requirements/runtime.lock
	@$(BIN)/uv pip compile -q --upgrade --no-emit-index-url --no-emit-find-links --generate-hashes --no-header \
		--no-annotate --python-version 3.11 --extra dev -c requirements/runtime.lock pyproject.toml \
		-o requirements/dev.lock
	@$(BIN)/uv pip compile -q --upgrade --no-emit-index-url --no-emit-find-links --generate-hashes --no-header \
		--no-annotate --python-version 3.11 --extra bench -c requirements/dev.lock pyproject.toml \
		-o requirements/bench.lock

clean: ## remove what `make setup` made in this folder (images stay in the cache)
	rm -rf $(VENV) tests/js/node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
