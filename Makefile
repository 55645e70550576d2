# One command each. `make demo`, `make test`, `make lint`, `make docs` and `make bench` first make their own
# environment in .venv (nothing outside this folder is touched); the second run finds it ready.
#
#   make test TORCH="torch==2.13.0"       another torch (then the tests that need torchvision are skipped)
#   make test PYTEST_ARGS="-k allreduce"  some tests
#   make demo PYTHON=python3.12 VENV=/tmp/v

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.14.1 torchvision==0.29.1
PYTEST_ARGS ?=

BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq  # errors only
EXTRAS := build demo test lint docs bench
TORCH_STAMP := $(VENV)/.stamp-torch-$(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' '_')
NATIVE := setup.py pyproject.toml hvdtorch/version.py \
          $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu')
CXX_FILES := $(shell find csrc tests benchmarks -name '*.cc' -o -name '*.h' -o -name '*.cu')
DEMO_OUT := out/digits

.PHONY: help demo test lint format docs bench build clean distclean

help:
	@echo "make demo    train a small network on 2 processes (first time: 3 to 8 minutes)"
	@echo "make test    build and run all tests"
	@echo "make lint    ruff, mypy, clang-format"
	@echo "make format  let ruff and clang-format rewrite the files"
	@echo "make docs    the documentation, into site/"
	@echo "make bench   collectives, training steps and the control plane, into out/bench (15 minutes)"
	@echo "make build   the environment and the native core only"
	@echo "make clean   remove what was built; make distclean: .venv too"

# ---- the environment, in four steps ----

$(VENV)/.stamp-venv:
	@echo "[1/4] a Python environment in $(VENV) (seconds)"
	@command -v $(PYTHON) > /dev/null || \
	  { echo "$(PYTHON) is not found: install Python 3.10 or newer, or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than 3.10: name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "$(PYTHON) -m venv failed: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@touch $@

$(TORCH_STAMP): $(VENV)/.stamp-venv
	@echo "[2/4] $(TORCH) (1 to 2 minutes, and the download)"
	@rm -f $(VENV)/.stamp-torch-* $(VENV)/.stamp-build
	@case "$(TORCH)" in *torchvision*) ;; *) $(PIP) uninstall -y torchvision 2> /dev/null ;; esac
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.stamp-tools: pyproject.toml $(TORCH_STAMP)
	@echo "[3/4] tools and libraries of pyproject.toml (half a minute)"
	@$(BIN)/python .ci/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	@$(PIP) install -r $(VENV)/requirements.txt
	@touch $@

$(VENV)/.stamp-build: $(NATIVE) $(VENV)/.stamp-tools
	@echo "[4/4] compiling the native core (1 to 3 minutes; log in build/build.log)"
	@mkdir -p build
	@$(BIN)/python setup.py build_ext --inplace > build/build.log 2>&1 || \
	  { tail -n 40 build/build.log | cut -c 1-600; exit 1; }
	@sed -n '/^hvdtorch build summary/,/^$$/p' build/build.log
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

build: $(VENV)/.stamp-build

# ---- what people ask for ----

demo: build
	@echo "training on 2 processes: hvdrun -np 2 python examples/digits.py"
	@$(BIN)/hvdrun -np 2 $(BIN)/python examples/digits.py --out $(DEMO_OUT) --min-accuracy 0.97
	@echo "the checkpoint, read by plain PyTorch: python examples/predict_digits.py"
	@$(BIN)/python examples/predict_digits.py $(DEMO_OUT)/digits.pt
	@echo "training curve: $(DEMO_OUT)/curve.png"
	@echo "checkpoint:     $(DEMO_OUT)/digits.pt"

test: build
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.stamp-tools
	@echo "ruff";         $(BIN)/ruff check . && $(BIN)/ruff format --check -q .
	@echo "clang-format"; $(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	@echo "mypy";         $(BIN)/mypy

format: $(VENV)/.stamp-tools
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CXX_FILES)

docs: $(VENV)/.stamp-tools
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site
	@echo "documentation: site/index.html"

# Beside Horovod too: make bench HOROVOD_PYTHON=... (docs/benchmarks.md says how to get one).
WITH_HOROVOD = $(if $(HOROVOD_PYTHON),$(COMMA)horovod-gloo$(COMMA)horovod-mpi --horovod-python $(HOROVOD_PYTHON))
COMMA := ,
BENCH_OUT := out/bench
outputs = --json $(BENCH_OUT)/$(1).json --plot $(BENCH_OUT)/$(1).png

bench: build
	@mkdir -p $(BENCH_OUT)
	@$(BIN)/python benchmarks/collectives.py --goals --peers hvdtorch-arena,gloo$(WITH_HOROVOD) $(call outputs,collectives)
	@$(BIN)/python benchmarks/training.py --peers ddp-gloo$(WITH_HOROVOD) $(call outputs,training)
	@$(BIN)/python benchmarks/control_plane.py $(call outputs,control_plane)

clean:
	rm -rf build dist out site *.egg-info hvdtorch/_C.*.so .mypy_cache .ruff_cache .pytest_cache
	rm -f $(VENV)/.stamp-build
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
