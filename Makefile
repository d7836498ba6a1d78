# Two commands from a fresh clone: `make demo` and `make test`. Nothing else needs to be typed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-isas sanitize triton-compile lint bench clean

install: $(STAMP)

# torch first and pinned: pip's isolated build environment would ignore the pin.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/linattn/cpu/*.cpp src/linattn/cpu/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt "scikit-build-core>=0.11" cmake ninja
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

demo: install
	$(BIN)/linattn demo

# One thread for each of two workers: together they use two cores.
test: install
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# The CPU kernels as narrower processors run them; the widest set is part of `make test`. From it
# avx512 differs in how bfloat16 is rounded and multiplied, which tests/cpu and the convolution's see.
ISA_TESTS := tests/test_convolution.py tests/cpu
test-isas: install
	for isa in generic avx2 avx512; do \
	  more="tests/test_against_reference.py tests/test_properties.py"; \
	  if [ $$isa = avx512 ]; then more=; fi; \
	  LINATTN_CPU_ISA=$$isa OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -k cpu \
	    $$more $(ISA_TESTS) || exit 1; \
	done

# The CPU kernels under the address and undefined-behaviour sanitizers, and under the thread
# sanitizer in a program of their own. Leaks are not looked for: Python itself has some.
SANITIZED := tests/cpu tests/test_segments.py tests/test_states.py tests/test_against_reference.py \
  tests/test_convolution.py tests/test_selective_scan.py
sanitize: install
	PATH=$(CURDIR)/$(BIN):$$PATH; set -e; \
	for kind in address,undefined thread; do \
	  cmake -S . -B build/$$kind -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	    -DLINATTN_SANITIZE=$$kind >/dev/null; cmake --build build/$$kind; \
	done; \
	build/thread/kernel_races; \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 LINATTN_TEST_LIBRARY=$(CURDIR)/build/address,undefined \
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n 2 -k "cpu and not compile and not path_of_the_build" $(SANITIZED)

# Every Triton kernel for GPUs that are not here; half an hour on two cores.
triton-compile: install
	$(BIN)/python tools/triton_compile.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/linattn bench

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
