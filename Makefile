# Everything starts here: `make demo`, `make test`. The environment is made once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
BASE := $(VENV)/.base
READY := $(VENV)/.ready
DEV := -c constraints.txt -e '.[dev,docs]'
EVERYTHING := -e '.[dev,docs,ray]' uv
# uv takes a quarter of pip's time; pip where it is told to use an index of one's own, or uv fails
pip = $(1)/python -m pip install --quiet --disable-pip-version-check
install = if ! $(1)/python -m pip config list 2>/dev/null | grep -qE '[.](index-url|no-index)=' && \
  $(call pip,$(1)) -c constraints.txt uv 2>/dev/null && \
  $(1)/python -m uv pip install --quiet --python $(1)/python $(2) 2>/dev/null; \
  then true; else $(call pip,$(1)) $(2); fi

.PHONY: help demo tour test test-slow test-browser test-ray test-faults faults fuzz test-floor wheel audit lint format docs bench readme screenshots vendor update clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(BASE): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), half a minute to three: 6 GB, most of it torch."
	@$(PYTHON) -m venv $(VENV)
	@$(call install,$(BIN),-c constraints.txt -e .)
	@touch $@

$(READY): $(BASE)
	@echo "Installing what development needs besides."
	@$(call install,$(BIN),$(DEV))
	@touch $@

demo: $(BASE)  ## too sure, and mended by the margin: ten runs on hard digits, about a minute
	$(BIN)/calmatch demo

tour: $(READY)  ## own pictures: 40 labels, fit, predict, report, export; under three minutes
	rm -rf tour && $(BIN)/python examples/own_pictures.py tour

test: $(READY)  ## the fast tests, about three minutes on two cores
	$(BIN)/python -m pytest -n 2

test-slow: $(READY)  ## the slow tests too
	$(BIN)/python -m pytest -n 2 -m "not gpu"

test-browser: $(READY)  ## the report page in a real Chromium (installed by apt where one may)
	@{ command -v chromium && command -v chromedriver; } >/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } || \
	  { echo "Install Chromium and chromedriver first (Debian: chromium chromium-driver)."; exit 1; }
	$(BIN)/python -m pytest -m browser

test-ray: $(READY)  ## two Ray nodes on this machine, one of them killed
	@$(call install,$(BIN),-c constraints.txt -e '.[ray]')
	$(BIN)/python -m pytest -m ray

test-faults: $(READY)  ## a dozen real processes hit at random moments, a minute
	$(BIN)/python -m pytest -m faults

faults: $(READY)  ## the same 500 times, and attacks of a second campaign; HITS, SEED, KEEP=FILE to go on later
	$(BIN)/python tests/faults/run.py --hits $(or $(HITS),500) $(if $(SEED),--seed $(SEED)) $(if $(KEEP),--keep $(KEEP)) $(if $(RECORD),--record $(RECORD))
	$(BIN)/python tests/faults/second.py $(if $(RECORD),--record $(RECORD))

fuzz: $(READY)  ## 100,000 mutated inputs into everything that reads a stranger's file
	$(BIN)/python tools/fuzz.py --inputs $(or $(INPUTS),102000) $(if $(KEEP),--keep $(KEEP)) $(if $(RECORD),--record $(RECORD))

test-floor:  ## the fast tests with the lowest versions that pyproject.toml admits, in .venv-floor
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python tools/floors.py > .venv-floor/floors.txt
	@$(call install,.venv-floor/bin,-c .venv-floor/floors.txt -e '.[dev]')
	.venv-floor/bin/python -m pytest -n 2

wheel: $(READY)  ## wheel and sdist in dist/, and the wheel tried in an empty environment
	$(BIN)/python tools/wheel.py $(WHEEL)

audit: $(READY)  ## known vulnerabilities of what is installed, where their list can be had
	$(BIN)/python tools/audit.py

lint: $(READY)  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## put the code in the house's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY)  ## the documentation site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)  ## speed of metrics, methods, augmentation, the step, and what people wait for
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/methods.py
	$(BIN)/python benchmarks/augment.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python tools/readme.py --tree

readme: $(READY)  ## what README, architecture and CONTRIBUTING show, made anew
	$(BIN)/python tools/readme.py

screenshots: $(READY)  ## the report's pictures in the docs, made anew from five runs on digits
	$(BIN)/python tools/screenshots.py runs/screenshots

vendor: $(READY)  ## renew the plotting library that report pages carry, from npm
	$(BIN)/python tools/vendor.py

update:  ## renew constraints.txt: the newest versions that pass the tests
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@$(call install,$(BIN),$(EVERYTHING))
	$(BIN)/python -m pytest -n 2
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt
	@touch $(BASE) && touch $(READY)

clean:  ## remove what was made
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache
