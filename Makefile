# TORCH names the torch to install, for example TORCH=torch==2.13.0+cpu; a plain torch may bring several GB.
TORCH ?= torch
PYTHON ?= python3
SOURCES := $(wildcard artifacts/*.py bpc_calib/*.py cli/*.py)
# Strict: real links in site-packages, which mypy can follow; hence again whenever a file is new.
INSTALL := install -q --config-settings editable_mode=strict -e '.[dev]'

.PHONY: demo test test-floor clean

demo: .venv/ready
	mkdir -p demo
	cd demo && ../.venv/bin/python ../tests/tiny.py .
	cd demo && ../.venv/bin/bpc calibrate -m tiny-llama --corpus notes --samples 12 --force
	cd demo && ../.venv/bin/bpc inspect tiny-llama-bpc64.safetensors -m tiny-llama --plot residual.png --force
	cd demo && ../.venv/bin/bpc generate -m tiny-llama -a tiny-llama-bpc64.safetensors --prompt-file prompt.txt --compare --max-new-tokens 32

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest

# The oldest versions that pyproject.toml allows, but for torch.
test-floor: .venv-floor/ready
	.venv-floor/bin/pytest

.venv/ready: pyproject.toml $(SOURCES)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install -q '$(TORCH)'
	.venv/bin/pip $(INSTALL)
	touch $@

.venv-floor/ready: pyproject.toml $(SOURCES)
	test -x .venv-floor/bin/python || $(PYTHON) -m venv .venv-floor
	.venv-floor/bin/pip install -q '$(TORCH)'
	.venv-floor/bin/pip $(INSTALL) transformers==5.17.0 datasets==4.0.0 typer==0.20.1 rich==13.0.0 safetensors==0.8.0
	touch $@

clean:
	rm -rf .venv .venv-floor build demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
