# SPDX-License-Identifier: Apache-2.0
# The porcelain. `make` alone lists the targets; each sets up what it needs and does nothing twice.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
# -P: run the installed package, not the folder of the same name that lies here.
PY := $(VENV)/bin/python -P
# meson-python and ninja live in the environment, and pip must find them without isolation.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
# Half the cores, so that a shared machine stays usable.
JOBS ?= $(shell n=$$(( $$(nproc) / 2 )); echo $$(( n > 0 ? n : 1 )))
# Two makes in one checkout take turns.
LOCKED := mkdir -p build && flock build/.lock

DEPS := $(VENV)/.deps
INSTALLED := build/.installed
SOURCES := $(shell find dqplbd native systemd meson.build meson.options pyproject.toml README.md -name __pycache__ -prune \
	-o -path native/tests -prune -o -type f -print)

# What `make demo` takes: FILE=/path/to/a/file to move, KEEP=1 to leave the cluster up.
FILE ?=
KEEP ?=

.PHONY: rdma-ready help setup install demo test test-native test-python test-sanitized test-rdma test-gpu lab lint bench bench-rdma reproduce docs clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables: PYTHON=python3.12 (interpreter), JOBS=N (build jobs), demo: FILE=PATH KEEP=1, test: ARGS='-k word'"

setup: ## install system packages (or say which) and the virtual environment
	@scripts/setup.sh test >/dev/null
	@scripts/setup.sh bench >/dev/null
	@$(MAKE) $(DEPS)

# The environment is made anew when its interpreter is gone, and completed when the project's needs change.
$(DEPS): pyproject.toml
	@python=$$(scripts/setup.sh demo); \
	[ -x $(VENV)/bin/python ] && $(VENV)/bin/python -c '' 2>/dev/null || { echo "making $(VENV) with $$python"; "$$python" -m venv --clear $(VENV); }
	@$(VENV)/bin/python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb")); \
	print(*p["build-system"]["requires"], *p["project"]["dependencies"], *p["project"]["optional-dependencies"]["dev"], sep="\n")' \
	> $(VENV)/requirements.txt
	@echo "installing the Python packages that pyproject.toml names"
	@$(PIP) install 'pip>=23.1'
	@$(PIP) install -r $(VENV)/requirements.txt
	@touch $@

$(INSTALLED): $(DEPS) $(SOURCES)
	@echo "building and installing dqplbd into $(VENV)"
	@$(LOCKED) env $(IN_VENV) $(PIP) install --no-build-isolation --no-deps --force-reinstall \
		-Cbuild-dir=build/release -Csetup-args=-Dtools=true -Ccompile-args=-j$(JOBS) .
	@touch $@

install: $(INSTALLED) ## build the package and install it into the virtual environment

demo: ## show it all on this machine: eight hosts on loopback, near and far paths (FILE=PATH KEEP=1)
	@scripts/setup.sh demo >/dev/null
	@$(MAKE) $(INSTALLED)
	@$(PY) -m dqplbd.demo $(if $(FILE),--file "$(FILE)") $(if $(filter-out 0 no,$(KEEP)),--keep)

test: test-native test-python ## run all tests: C under the sanitizers, then pytest on the installed package (ARGS=...)

# The thread sanitizer wants a memory layout that the kernel's widest randomisation does not keep.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo --wrapper=\"setarch -R\")
MESON := $(IN_VENV) meson

test-native: $(DEPS)
	@scripts/setup.sh test >/dev/null
	@$(LOCKED) bash -euo pipefail -c ' \
	setup() { [ -f "$$1/build.ninja" ] || $(MESON) setup "$$1" -Dpython=false -Dtests=true -Db_sanitize="$$2" > "$$1.log" || { cat "$$1.log"; exit 1; }; }; \
	compile() { $(MESON) compile -C "$$1" -j $(JOBS) > "$$1.log" || { cat "$$1.log"; exit 1; }; }; \
	echo "building the C tests, twice: for the address and undefined sanitizers, and for the thread sanitizer"; \
	setup build/asan address,undefined; compile build/asan; \
	setup build/tsan thread; compile build/tsan'
	@echo "C tests, address and undefined sanitizers"
	@$(MESON) test -C build/asan --no-rebuild --print-errorlogs --num-processes $(JOBS) | grep -v -e '^$$' -e '^Full log' -e 'Entering directory'
	@echo "C tests with threads, thread sanitizer"
	@$(MESON) test -C build/tsan --no-rebuild --print-errorlogs --num-processes $(JOBS) --suite threaded $(NO_ASLR) | grep -v -e '^$$' -e '^Full log' -e 'Entering directory'

# Whole daemons with the native parts under the sanitizers. Leaks are the C tests' concern: the interpreter has its own.
# Programs that tests compile are left out: the compiler cannot run with the sanitizer in its process.
SANITIZED := build/sanitized
test-sanitized: $(DEPS) ## run the integration tests on daemons under the address and undefined sanitizers (ARGS=...)
	@scripts/setup.sh test >/dev/null
	@mkdir -p build && [ -x $(SANITIZED)/bin/python ] || $(VENV)/bin/python -m venv --without-pip $(SANITIZED)
	@$(VENV)/bin/python -c 'import site; print(*site.getsitepackages(), sep="\n")' \
	> "$$($(SANITIZED)/bin/python -c 'import site; print(site.getsitepackages()[0])')/environment.pth"
	@echo "building with the address and undefined sanitizers into $(SANITIZED)"
	@$(LOCKED) env $(IN_VENV) $(VENV)/bin/python -m pip --python $(SANITIZED)/bin/python --disable-pip-version-check -qq install \
		--no-build-isolation --no-deps --force-reinstall -Cbuild-dir=build/sanitized-wheel -Csetup-args=-Db_lundef=false \
		-Csetup-args=-Db_sanitize=address,undefined -Ccompile-args=-j$(JOBS) .
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 \
	UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 $(SANITIZED)/bin/python -P -m pytest -q tests/integration \
		-k "not complete_program and not test_nccl" $(ARGS)

test-python: $(INSTALLED)
	@scripts/setup.sh test >/dev/null
	@echo "Python tests: whole daemons first, which take minutes, then units"
	@$(PY) -m pytest -q $(ARGS)

# What Meson built into the package: whether libibverbs' header was there is asked once a build folder.
TARGETS := build/release/meson-info/intro-targets.json

# The kernel's RDMA stack without RDMA hardware: in a guest, or on this machine where its kernel has soft-RoCE.
# Python sees the distribution's pyverbs, which has no wheel, through a link.
rdma-ready:
	@scripts/setup.sh rdma >/dev/null
	@[ ! -f $(TARGETS) ] || grep -q verbs_qp.c $(TARGETS) || { echo "libibverbs-dev is new here: building once more"; \
	rm -rf build/release $(INSTALLED); }
	@$(MAKE) $(INSTALLED)
	@$(PY) tests/vm/pyverbs_link.py
	@place=$$($(PY) tests/vm/guest.py --place) || exit; [ "$$place" != qemu ] || scripts/setup.sh qemu >/dev/null

test-rdma: rdma-ready ## run the RDMA tests on the kernel's soft-RoCE, in a guest where need be (ARGS=...)
	@echo "building the C tests over RDMA, twice: for the undefined sanitizer, and for valgrind"
	@$(LOCKED) $(PY) tests/vm/native.py --jobs $(JOBS)
	@$(PY) tests/vm/run.py $(ARGS)

# Exit code 77: there is no GPU, or no PyTorch, and nothing was tested.
test-gpu: $(INSTALLED) ## run two NCCL ranks on this machine's GPUs through two daemons (ARGS='--python PYTHON_WITH_TORCH')
	@$(PY) tests/nccl/job.py $(ARGS) || { code=$$?; [ $$code = 77 ] || exit $$code; }

lint: $(DEPS) ## check style, types and licence lines
	@$(VENV)/bin/ruff check dqplbd tests
	@$(VENV)/bin/ruff format --check dqplbd tests
	@$(VENV)/bin/mypy dqplbd tests
	@scripts/check-spdx.sh

bench: ## measure against the references, print the table, write build/bench.json
	@scripts/setup.sh bench >/dev/null
	@$(MAKE) $(INSTALLED)
	@$(PY) tests/bench/run.py $(ARGS)

reproduce: $(INSTALLED) ## repeat the published results on the simulated fabric, write build/reproduce.json (ARGS='--only NAME')
	@$(PY) tests/bench/reproduce.py $(ARGS)

bench-rdma: rdma-ready ## measure on soft-RoCE beside perftest, print the table, add to build/rdma.json
	@$(PY) tests/vm/bench.py $(ARGS)

lab: rdma-ready ## whole daemons in simulated time: 32 hosts in racks, zones, buildings (HOSTS=16 SEED=1 SCENARIO=incast)
	@$(PY) tests/vm/lab/run.py $(if $(HOSTS),--hosts $(HOSTS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(SCENARIO),--scenario $(SCENARIO)) $(ARGS)

docs: $(INSTALLED) ## write docs/configuration.md and docs/metrics.md again from the models and the catalogue
	@mkdir -p docs build
	@$(PY) -m dqplbd.config_reference > build/configuration.md
	@$(PY) -m dqplbd.metrics.reference > build/metrics.md
	@mv build/configuration.md build/metrics.md docs/

clean: ## remove everything built
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find dqplbd tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove everything built and the virtual environment
	@rm -rf $(VENV)
