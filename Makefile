# Each target sets up what it needs: a virtual environment in .venv, nothing outside of the checkout.
PYTHON ?= python3
BIN := .venv/bin
SEEDS ?= 10000
# Most tests wait for real processes and seconds, so more of them than cores fit side by side.
WORKERS ?= 4

.PHONY: help demo test check bench simulate soak clean

help:            ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1: /' | awk -F': ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: .venv/ready            ## a cluster is killed and paused, beside a plain lock; then the proof (30 s)
	@$(BIN)/fencepost demo

test: .venv/dev .servers/ready            ## every test, on real files and processes
	@$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal

check: .venv/dev            ## format, lint, types, tidiness
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/pytest tests/test_tidy.py

bench: .venv/dev            ## costs as ratios to the raw driver, interleaved in one run
	@$(BIN)/python bench/run.py

simulate: .venv/ready            ## SEEDS=10000 simulated clusters with every fault: leases, runs, races
	@$(BIN)/fencepost simulate --seeds $(SEEDS)

soak: .venv/dev            ## what is too long for every day: 200 kills in each mode, 100,000 seeds
	@FENCEPOST_KILLS=200 $(BIN)/pytest tests/faults/test_job_deaths.py
	@FENCEPOST_LEFTOVERS=50 $(BIN)/pytest tests/cli/test_left_behind.py tests/executors/test_left_behind_by_jobs.py
	@FENCEPOST_EXPRESSIONS=10000 $(BIN)/pytest tests/model/test_schedule_dst.py
	@FENCEPOST_ALARMS=10000 $(BIN)/pytest tests/alarms/test_alarm_deaths.py
	@FENCEPOST_OLD_SLOTS=10000 $(BIN)/pytest tests/ledger/test_old_slots.py
	@FENCEPOST_SEEDS=100000 $(BIN)/pytest tests/alarms/test_alarms_in_storms.py
	@FENCEPOST_SOAK_SECONDS=120 $(BIN)/pytest tests/scheduler/test_cluster_kills.py tests/scheduler/test_ticks_at_once.py
	@$(BIN)/fencepost simulate --seeds 100000
	@$(BIN)/fencepost simulate --seeds 5000 --store sqlite

clean:            ## remove what the other targets made
	rm -rf .venv .servers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fencepost needs Python 3.11 or newer: make PYTHON=python3.11 …"; exit 1; }
	@$(PYTHON) -m venv .venv

# The package alone: enough to run it.
.venv/ready: pyproject.toml | .venv/bin/python
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

# And what its tests need.
.venv/dev: pyproject.toml | .venv/bin/python
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ .venv/ready

# Servers that no wheel brings: Debian's packages, unpacked into the checkout, nothing installed.
.servers/ready: tests/kit/servers/fetch.py
	@rm -rf .servers
	@$(PYTHON) tests/kit/servers/fetch.py .servers
	@touch $@
