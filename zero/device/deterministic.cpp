#include "zero/device/deterministic.h"

#include <ATen/Context.h>

#include <cstdlib>

namespace zero {

DeterministicOperators::DeterministicOperators(bool on) : on_(on) {
  if (!on_) return;
  auto& context = at::globalContext();
  before_ = context.deterministicAlgorithms();
  before_warns_ = context.deterministicAlgorithmsWarnOnly();
  before_fills_ = context.deterministicFillUninitializedMemory();
  before_cudnn_ = context.deterministicCuDNN();
  before_benchmarks_ = context.benchmarkCuDNN();
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  // Nobody reads memory that is new, so filling it would only take time.
  context.setDeterministicFillUninitializedMemory(false);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);  // it may choose another kernel each time
}

DeterministicOperators::~DeterministicOperators() {
  if (!on_) return;
  auto& context = at::globalContext();
  context.setDeterministicAlgorithms(before_, before_warns_);
  context.setDeterministicFillUninitializedMemory(before_fills_);
  context.setDeterministicCuDNN(before_cudnn_);
  context.setBenchmarkCuDNN(before_benchmarks_);
}

bool DeterministicOperators::active() { return at::globalContext().deterministicAlgorithms(); }

}  // namespace zero
