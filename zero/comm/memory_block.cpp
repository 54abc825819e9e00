#include "zero/comm/memory_block.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <memory>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_memory.h"

namespace zero::comm {

SharedBlock::SharedBlock(std::shared_ptr<Arena> arena, int64_t bytes)
    : arena_(std::move(arena)), offset_(arena_->allocate(bytes)) {}

SharedBlock::SharedBlock(std::shared_ptr<Arena> arena, int64_t bytes,
                         const std::shared_ptr<Ledger>& ledger, Category category)
    : SharedBlock(std::move(arena), bytes) {
  charge_ = Charge(ledger, category, bytes);
}

SharedBlock::~SharedBlock() { arena_->free(offset_); }

at::Tensor shared_tensor(const std::shared_ptr<Arena>& arena, int64_t numel, at::ScalarType dtype,
                         const std::shared_ptr<Ledger>& ledger, Category category) {
  if (numel == 0) return at::empty({0}, dtype);
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  auto block = std::make_shared<SharedBlock>(arena, bytes, ledger, category);
  auto* data = block->data();
  return at::from_blob(
      data, {numel}, [block = std::move(block)](void*) mutable { block.reset(); },
      at::TensorOptions(dtype));
}

at::Tensor private_tensor(int64_t numel, at::ScalarType dtype,
                          const std::shared_ptr<Ledger>& ledger, Category category) {
  if (numel == 0) return at::empty({0}, dtype);
  // A system that overcommits would grant more than there is, and end the process later.
  const auto bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes > physical_memory()) {
    throw OutOfMemory(fmt::format("Cannot allocate {} for {}; this machine has {} of memory.",
                                  format_bytes(static_cast<double>(bytes)), name(category),
                                  format_bytes(static_cast<double>(physical_memory()))));
  }
  return host_zeros(numel, dtype, ledger, category);
}

}  // namespace zero::comm
