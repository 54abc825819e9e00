#include "zero/base/host_memory.h"

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "zero/base/error.h"

namespace zero {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// An anonymous mapping. One larger than a huge page starts on a multiple of it, for which up to
// that much address space (not memory) is given up.
class Mapping {
 public:
  explicit Mapping(size_t bytes) {
    const bool huge = bytes >= kHugePage;
    length_ = bytes + (huge ? kHugePage : 0);
    base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      throw OutOfMemory(fmt::format("The system has no {} of memory left for this rank.",
                                    format_bytes(static_cast<double>(bytes))));
    }
    data_ = base_;
    if (huge) {
      const auto address = reinterpret_cast<uintptr_t>(base_);
      data_ = reinterpret_cast<void*>((address + kHugePage - 1) / kHugePage * kHugePage);
      madvise(data_, bytes, MADV_HUGEPAGE);  // advice: without huge pages the memory is the same
    }
  }
  ~Mapping() { munmap(base_, length_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  void* data() const { return data_; }

 private:
  void* base_;
  void* data_;
  size_t length_;
};

}  // namespace

at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category) {
  const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
  auto mapping = std::make_shared<Mapping>(static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  auto charge = std::make_shared<Charge>(std::move(ledger), category, bytes);
  void* data = mapping->data();
  return at::from_blob(
      data, {numel}, [mapping = std::move(mapping), charge = std::move(charge)](void*) {},
      at::TensorOptions().dtype(dtype));
}

}  // namespace zero
