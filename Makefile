# Two commands matter: `make demo` and `make test`. Each installs what it needs, builds, and does its job.
# LIBTORCH=DIR uses an existing LibTorch; LIBTORCH_VERSION=X installs another pinned release.
# CUDA=1 with setup, build, python and test: a LibTorch with CUDA, and the plugin for CUDA devices, in build/cuda (docs/devices.md).
export CUDA
preset := $(if $(filter 1,$(CUDA)),cuda,release)
.DEFAULT_GOAL := help
.PHONY: help demo test setup build python wheel asan tsan fuzz lint format clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile | expand -t 16

demo: build ## train a small GPT-2 on the King James Bible, stage 3 on 2 ranks, 5 minutes
	@ZERO=$${ZERO:-build/$(preset)/zero} scripts/demo.sh

test: setup ## build everything, and run every test
	-@scripts/monitors_environment.sh # without it its test is skipped, and says so
	-@scripts/trace_environment.sh # likewise
	-@scripts/python_environment.sh # likewise; 3 GB
	@scripts/build.sh $(preset)
	@scripts/test.sh $(preset)

setup: ## install system packages (apt) and LibTorch (PyPI): only what is missing
	@scripts/setup.sh

build: setup ## build the library and the program build/release/zero, without the tests; CUDA=1: for CUDA devices, build/cuda/zero
	@scripts/build.sh $(preset) zero_program $(if $(filter 1,$(CUDA)),zero_cuda)

python: setup ## build the Python package in build/release/python, and install PyTorch for it (3 GB, in the cache folder)
	@scripts/python_environment.sh
	@scripts/build.sh $(preset) zero_python $(if $(filter 1,$(CUDA)),zero_cuda)

wheel: setup ## build the wheel of the Python package in build/wheel
	@scripts/wheel.sh

asan: ## build with AddressSanitizer and UBSan, by clang, and run every test that is not long
	@scripts/setup.sh asan
	@scripts/build.sh asan
	@scripts/test.sh asan --short

tsan: ## build with ThreadSanitizer, by clang, and run every test
	@scripts/setup.sh asan
	@scripts/build.sh tsan
	@scripts/test.sh tsan

fuzz: ## fuzz what reads files and pipes under AddressSanitizer, one minute each
	@scripts/setup.sh asan
	@scripts/fuzz.sh 60

lint: ## clang-tidy over every source
	@scripts/setup.sh lint
	@scripts/lint.sh

format: ## clang-format over every source
	@scripts/setup.sh lint
	@scripts/format.sh

clean: ## remove the build folders (LibTorch stays in the cache folder)
	rm -rf build
