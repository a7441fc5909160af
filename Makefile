# TORCH names the torch to install, for example TORCH=torch==2.13.0+cpu; a plain torch may bring several GB.
TORCH ?= torch
PYTHON ?= python3
SOURCES := $(wildcard artifacts/*.py bpc_calib/*.py bpc_calib/bench/*.py bpc_calib/backends/cpu/*.py bpc_calib/evaluation/*.py bpc_calib/backends/triton/*.py bpc_calib/demo/* cli/*.py)
# Strict: real links in site-packages, which mypy can follow; hence again whenever a file is new.
INSTALL := install -q --config-settings editable_mode=strict -e '.[dev]'

.PHONY: demo demo-model test test-floor gpu clean

demo: .venv/ready
	.venv/bin/bpc demo

# Trains the bundled model anew, in less than an hour on two cores; run it again to go on where it stopped.
demo-model: .venv/ready
	.venv/bin/python training/demo_model.py build/demo-model
	cp build/demo-model/config.json build/demo-model/generation_config.json build/demo-model/model.safetensors \
	  build/demo-model/tokenizer.json build/demo-model/tokenizer_config.json bpc_calib/demo/

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest

# The oldest versions that pyproject.toml allows, but for torch.
test-floor: .venv-floor/ready
	.venv-floor/bin/pytest

# Everything worth measuring on an NVIDIA GPU, in 8 minutes; without one nothing. TORCH= must be a torch with CUDA.
gpu: .venv/ready
	.venv/bin/python benchmarks/gpu_suite.py

.venv/ready: pyproject.toml $(SOURCES)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install -q '$(TORCH)'
	.venv/bin/pip $(INSTALL)
	touch $@

.venv-floor/ready: pyproject.toml $(SOURCES)
	test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	.venv-floor/bin/pip install -q '$(TORCH)'
	.venv-floor/bin/pip $(INSTALL) transformers==5.17.0 datasets==4.0.0 typer==0.20.1 rich==13.0.0 safetensors==0.8.0 triton==3.6.0 numba==0.61.2
	touch $@

clean:
	rm -rf .venv .venv-floor build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
