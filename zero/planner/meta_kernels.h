// Kernels for meta that LibTorch registers from Python alone. Private to the tracer.
#pragma once

namespace zero::plan {

/// Registers those that are missing in this process. Calling it again does nothing. Thread-safe.
void add_meta_kernels();

}  // namespace zero::plan
