// Host memory for states and staging: page-aligned, huge pages where they help, charged to a
// ledger.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/base/ledger.h"

namespace zero {

/// A zero-filled 1-D CPU tensor of `numel` elements, aligned to a page (2 MiB and advised huge from
/// that size on), charged to `category` as long as its storage lives. Throws OutOfMemory naming the
/// bytes.
at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category);

}  // namespace zero
