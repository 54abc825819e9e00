#include "zero/base/host_memory.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/host_allocator.h"
#include "zero/base/host_space.h"
#include "zero/base/memory_mapping.h"

namespace zero {

namespace {

constexpr size_t kColourBytes = size_t{5} << 12;  // distance between two colours

}  // namespace

at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category, int64_t colour) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  const auto wanted = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  const bool huge = wanted >= MemoryMapping::kHugePage;
  const size_t skipped = huge ? static_cast<size_t>(colour) * kColourBytes : 0;
  auto mapping = std::make_shared<MemoryMapping>(
      MemoryMapping::Request{.bytes = skipped + wanted,
                             .alignment = huge ? MemoryMapping::kHugePage : MemoryMapping::kPage});
  if (!*mapping) {
    throw OutOfMemory(fmt::format("The system has no {} of memory left for this rank.",
                                  format_bytes(static_cast<double>(bytes))));
  }
  if (huge) mapping->advise_huge(skipped + wanted);
  auto charge = std::make_shared<Charge>(std::move(ledger), category, bytes);
  void* data = mapping->data() + skipped;
  return at::from_blob(
      data, {numel}, [mapping = std::move(mapping), charge = std::move(charge)](void*) {},
      at::TensorOptions().dtype(dtype));
}

namespace {

// Owns a charged block of the host allocator. The block is given back together with its charge.
struct ChargedBlock {
  ChargedBlock() = default;
  ChargedBlock(const ChargedBlock&) = delete;
  ChargedBlock& operator=(const ChargedBlock&) = delete;
  ~ChargedBlock() {
    if (data != nullptr) HostAllocator::instance().give_charged(data);
  }
  Charge charge;
  void* data = nullptr;
};

// Returns a tensor at `data`, which lies in the block.
at::Tensor charged_tensor(void* data, std::shared_ptr<ChargedBlock> block, int64_t numel,
                          at::ScalarType dtype) {
  return at::from_blob(
      data, {numel}, [block = std::move(block)](void*) {}, at::TensorOptions().dtype(dtype));
}

at::Tensor new_charged_tensor(size_t block_bytes, int64_t numel, at::ScalarType dtype,
                              std::shared_ptr<Ledger> ledger, Category category) {
  auto block = std::make_shared<ChargedBlock>();
  block->charge = Charge(std::move(ledger), category,  // first, since it may be refused
                         numel * static_cast<int64_t>(c10::elementSize(dtype)));
  block->data = HostAllocator::instance().take_charged(block_bytes);
  return charged_tensor(block->data, block, numel, dtype);
}

}  // namespace

at::Tensor host_empty(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category) {
  const auto bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  return new_charged_tensor(std::max<size_t>(bytes, 1), numel, dtype, std::move(ledger), category);
}

at::Tensor host_pages(int64_t bytes, std::shared_ptr<Ledger> ledger, Category category) {
  const auto whole = at::round_up(static_cast<size_t>(bytes), HostSpace::kPage);
  return new_charged_tensor(std::max(whole, HostAllocator::kPaged), bytes, at::kByte,
                            std::move(ledger), category);
}

at::Tensor host_part(at::Tensor array, int64_t begin, int64_t numel, std::shared_ptr<Ledger> ledger,
                     Category category) {
  const auto width = array.element_size();
  const auto first = static_cast<size_t>(array.storage_offset() + begin) * width;
  auto* const data = static_cast<std::byte*>(array.storage().mutable_data()) + first;
  if (numel > 0) {
    const size_t bytes = static_cast<size_t>(numel) * width;
    auto block = std::make_shared<ChargedBlock>();
    auto& storage = *array.storage().unsafeGetStorageImpl();
    block->data =
        HostAllocator::instance().keep_charged(storage.mutable_data_ptr(), first, first + bytes);
    if (block->data != nullptr) {
      block->charge = Charge(std::move(ledger), category, static_cast<int64_t>(bytes));
      return charged_tensor(data, std::move(block), numel, array.scalar_type());
    }
  }
  auto part = host_empty(numel, array.scalar_type(), std::move(ledger), category);
  part.copy_(array.narrow(0, begin, numel));
  return part;
}

}  // namespace zero
