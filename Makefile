# Two commands on a fresh machine: make quickstart, make test.
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SLOW ?= 0
# Each file of tests is whole in one test process. On two cores: parts compute all the time, whole runs often wait for their processes.
UNITS_ARGS ?= -n 2 --dist loadfile
RUNS_ARGS ?= -n 4 --dist loadfile

# Byte code is cached: else every process of every test would compile the project again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test lint docs tutorials reference clean

quickstart: $(STAMP)
	$(VENV)/bin/dpcfl quickstart

# Two stages: parts first, then whole runs. A failure in the first stops. pytest's summary line ends with the time of its stage.
PYTEST = $(PY) -m pytest $(if $(filter 1,$(SLOW)),-m "slow or not slow",)
test: $(STAMP) $(if $(filter 1,$(SLOW)),$(VENV)/.docs) lint
	@echo "stage 1 of 2: parts (gate, codec, accounting, models)"
	$(PYTEST) $(UNITS_ARGS) --stage units
	@echo "stage 2 of 2: whole runs"
	$(PYTEST) $(RUNS_ARGS) --stage runs

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy dpcfl_net

# The site, in build/site/index.html. Warnings are errors: a broken link or an unknown language of code fails.
docs: $(VENV)/.docs
	$(PY) -m sphinx -q -W --keep-going -j auto -b html docs build/site
	@echo "site: build/site/index.html"

# The notebooks of docs/tutorials, each cell executed.
tutorials: $(STAMP)
	$(PY) -m pytest -m slow -n 2 tests/api/test_tutorials.py

# The pages of the reference that are made from the code: keys of the configuration, commands, Python API.
reference: $(STAMP)
	PYTHONPATH=docs $(PY) -m reference_pages

$(VENV)/.docs: $(STAMP)
	$(PY) -m pip install -q -c constraints-cpu.txt -e '.[docs]'
	touch $@

# torch first: without it pip would take the newest build with gigabytes of CUDA for the packages that need it.
$(STAMP): pyproject.toml constraints-cpu.txt
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q -c constraints-cpu.txt torch
	$(PY) -m pip install -q -c constraints-cpu.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
