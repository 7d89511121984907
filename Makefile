# Everything that a developer or a curious operator does, by name. Needs make and Python 3.11 or newer (with its venv
# module); `make test` also needs gpg and gpgv, for signatures.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The Python that .venv is made from; the first of these that is new enough and can make a venv.
PYTHON ?=
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14 /usr/bin/python3
JOBS ?= 2
CHECKED := src tests twisted bench

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/stanchion-ready

.PHONY: help up test lint types bench soak clean

help:
	@echo 'make up      a region and a rack on this machine, with a small sample stream; Ctrl-C stops them'
	@echo '             SOURCE=URL KEYRING=FILE uses a real stream; SELECT="ubuntu/noble:amd64 …" only parts of it'
	@echo 'make test    every test (TESTS=tests.rpc only those; JOBS=4 processes)'
	@echo 'make lint    ruff: style and format'
	@echo 'make types   mypy, strict'
	@echo 'make bench   the measurements, as a table'
	@echo 'make soak    images that change in every order of events, crashes at every step of an import and a sync,'
	@echo '             and hostile and broken input for the link between region and rack, for SECONDS=600'
	@echo 'make clean   remove what these made: .venv, .state and caches'

$(READY): setup.cfg pyproject.toml
	@python=; \
	for candidate in $(or $(PYTHON),$(CANDIDATES)); do \
	    if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        python="$$candidate"; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo 'make: needs Python 3.11 or newer with venv (Debian: apt install python3 python3-venv); tried: $(or $(PYTHON),$(CANDIDATES))' >&2; \
	    exit 1; \
	fi; \
	echo "making $(VENV) with $$($$python --version) …"; \
	"$$python" -m venv $(VENV)
	@$(BIN)/python -m pip --quiet --disable-pip-version-check install --use-pep517 --editable '.[dev]'
	@# So that twistd finds twisted/plugins of this tree, wherever it is started.
	@pwd > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stanchion-plugins.pth"
	@touch $@

up: $(READY)
	@exec $(BIN)/stanchion up $(if $(SOURCE),'$(SOURCE)') $(if $(KEYRING),--keyring '$(KEYRING)') \
	    $(foreach one,$(SELECT),--select '$(one)') $(if $(STATE),--state '$(STATE)') $(UP)

TESTS ?= tests

test: $(READY)
	@for program in gpg gpgv; do \
	    command -v $$program > /dev/null || echo "make test: $$program is not installed; the tests of signatures will fail" >&2; \
	done
	$(BIN)/python -m twisted.trial -j$(JOBS) $(TESTS)

lint: $(READY)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)

types: $(READY)
	$(BIN)/mypy $(CHECKED)

bench: $(READY)
	$(BIN)/python -m bench

# How long to soak; it ends with status 1 at a violation.
SECONDS ?= 600

soak: $(READY)
	$(BIN)/python -m tests.soak $(SECONDS)

clean:
	@# As root the state may be elsewhere (README.rst); the program knows where.
	-@[ ! -e $(READY) ] || rm -rf -- "$$($(BIN)/python -P -c \
	    'import pathlib, rpc.profile; print(rpc.profile.state_directory(pathlib.Path.cwd()))')"
	rm -rf $(VENV) .state build dist src/*.egg-info _trial_temp* .mypy_cache .ruff_cache .hypothesis
	find src tests bench twisted -name __pycache__ -type d -prune -exec rm -rf {} +
	find twisted -name dropin.cache -delete
