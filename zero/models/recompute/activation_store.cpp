#include "zero/models/recompute/activation_store.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/store/folder.h"

namespace zero {

namespace {

// Each activation has this alignment in a buffer or file. Matrix products depend on it, so it is
// that of the memory that a large tensor gets.
constexpr int64_t kAlignment = store::kAlignment;

int64_t aligned(int64_t bytes) { return at::round_up(bytes, kAlignment); }

at::Tensor bytes_of(int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
}

struct Shape {
  explicit Shape(const at::Tensor& values)
      : sizes(values.sizes().vec()),
        strides(values.strides().vec()),
        dtype(values.scalar_type()),
        bytes(aligned(static_cast<int64_t>(values.nbytes()))) {}
  /// Returns a tensor of this shape at a byte of `memory`. It is no view: views of one tensor share
  /// a version counter, so autograd would take a write to one activation for a write to all.
  at::Tensor at_byte(const at::Tensor& memory, int64_t byte) const {
    const auto element = static_cast<int64_t>(c10::elementSize(dtype));
    return at::empty({0}, at::TensorOptions().dtype(dtype))
        .set_(memory.storage(), byte / element, sizes, strides);
  }
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  int64_t bytes;  // rounded up
};

void check(const at::Tensor& values) {
  if (values.is_cpu() && values.layout() == at::kStrided && values.is_non_overlapping_and_dense())
    return;
  throw ConfigError(
      "An ActivationStore takes dense CPU tensors without gaps or overlaps; give it "
      "values.contiguous().");
}

// Takes dropped slots from the top of the stack.
template <class Slot>
void pop_dropped(std::vector<Slot>& slots) {
  while (!slots.empty() && slots.back().dropped) slots.pop_back();
}

}  // namespace

// --- In one buffer ---

struct ContiguousActivations::Impl {
  struct Slot {
    int64_t offset = 0;
    int64_t bytes = 0;
    at::Tensor values;
    bool dropped = false;
  };
  mutable std::mutex mutex;
  at::Tensor buffer = bytes_of(0);
  int64_t most = 0;  // bytes that a step has needed
  std::vector<Slot> slots;
};

ContiguousActivations::ContiguousActivations() : impl_(std::make_unique<Impl>()) {}
ContiguousActivations::~ContiguousActivations() = default;

int64_t ContiguousActivations::put(const at::Tensor& values) {
  check(values);
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  const std::lock_guard lock(impl.mutex);
  const Shape shape(values);
  if (impl.slots.empty() && impl.buffer.numel() < impl.most) {
    impl.buffer = at::Tensor();  // before the new one is there
    impl.buffer = bytes_of(impl.most);
  }
  const int64_t offset =
      impl.slots.empty() ? 0 : impl.slots.back().offset + impl.slots.back().bytes;
  impl.most = std::max(impl.most, offset + shape.bytes);
  auto copy =
      offset + shape.bytes <= impl.buffer.numel()
          ? shape.at_byte(impl.buffer, offset)
          : at::empty_strided(shape.sizes, shape.strides, at::TensorOptions().dtype(shape.dtype));
  copy.copy_(values);
  impl.slots.push_back({.offset = offset, .bytes = shape.bytes, .values = std::move(copy)});
  return static_cast<int64_t>(impl.slots.size()) - 1;
}

at::Tensor ContiguousActivations::get(int64_t handle) {
  const std::lock_guard lock(impl_->mutex);
  return impl_->slots.at(static_cast<size_t>(handle)).values;
}

void ContiguousActivations::done(int64_t /*handle*/) {}

void ContiguousActivations::drop(int64_t handle) noexcept {
  const std::lock_guard lock(impl_->mutex);
  auto& slot = impl_->slots[static_cast<size_t>(handle)];
  slot.dropped = true;
  slot.values = at::Tensor();
  pop_dropped(impl_->slots);
}

int64_t ContiguousActivations::bytes() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->buffer.numel();
}

// --- In files ---

struct DiskActivations::Impl {
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  struct Slot {
    Shape shape;
    size_t file = 0;
    int64_t offset = 0;
    size_t buffer = kNone;  // that holds its values
    bool used = false;      // by whoever called get
    bool dropped = false;
  };
  struct Buffer {
    at::Tensor memory = bytes_of(0);
    int64_t begin = 0;  // its first aligned byte
    int64_t bytes = 0;
    size_t slot = kNone;
    bool reading = false;
    store::Transfer transfer;  // of the slot
    std::byte* data() const { return static_cast<std::byte*>(memory.mutable_data_ptr()) + begin; }
  };

  explicit Impl(DiskActivationOptions chosen)
      : options(std::move(chosen)),
        folder(options.folder),
        buffers(static_cast<size_t>(options.buffers)) {}

  // Returns the place behind the top of the stack: in its file, or the next one that is large
  // enough.
  std::pair<size_t, int64_t> place(int64_t bytes) {
    size_t file = 0;
    int64_t offset = 0;
    if (!slots.empty()) {
      file = slots.back().file;
      offset = slots.back().offset + slots.back().shape.bytes;
    }
    while (file < files.size() && offset + bytes > files[file]->bytes()) {
      ++file;
      offset = 0;
    }
    if (file == files.size()) {
      files.push_back(
          std::make_unique<store::File>(fmt::format("{}/activations-{}", folder.path(), file),
                                        std::max(options.file_bytes, bytes), options.file));
    }
    return {file, offset};
  }

  // Returns the buffer whose values are needed last when backward is at `position` and goes down:
  // free, or of a slot above it, or the lowest. Those of slots from `keep` on and below `position`
  // stay. kNone where there is none.
  size_t replaceable(size_t position, size_t keep) const {
    size_t best = kNone;
    for (size_t b = 0; b < buffers.size(); ++b) {
      const size_t slot = buffers[b].slot;
      if (slot == kNone) return b;
      if (slots[slot].used || slot == position || (slot < position && slot >= keep)) continue;
      const auto later = [&](size_t s) { return s > position ? 0 : s + 1; };
      if (best == kNone || later(slot) < later(buffers[best].slot)) best = b;
    }
    return best;
  }

  // Throws where a transfer has failed: its buffer must never be given out.
  void refuse_after_failure() const {
    if (!failure.empty()) throw StoreError(failure);
  }
  void wait(Buffer& buffer) {
    try {
      buffer.transfer.wait();
    } catch (const StoreError& error) {
      failure = error.what();
      throw;
    }
  }

  // Gives a buffer to a slot, once what it holds is on the disk.
  Buffer& assign(size_t b, size_t slot) {
    auto& buffer = buffers[b];
    if (buffer.slot != kNone) {
      wait(buffer);
      slots[buffer.slot].buffer = kNone;
      buffer.slot = kNone;
    }
    const int64_t bytes = slots[slot].shape.bytes;
    if (buffer.bytes < bytes) {
      buffer.memory = at::Tensor();
      buffer.memory = bytes_of(bytes + kAlignment);
      const auto address = reinterpret_cast<intptr_t>(buffer.memory.mutable_data_ptr());
      buffer.begin = aligned(address) - address;
      buffer.bytes = bytes;
    }
    buffer.slot = slot;
    slots[slot].buffer = b;
    return buffer;
  }

  void read(size_t b, size_t slot) {
    auto& buffer = assign(b, slot);
    const auto& s = slots[slot];
    buffer.transfer = files[s.file]->read(s.offset, buffer.data(), s.shape.bytes);
    buffer.reading = true;
  }

  void read_ahead(size_t position) {
    for (size_t next = position; next-- > 0;) {
      if (slots[next].dropped || slots[next].buffer != kNone) continue;
      const size_t b = replaceable(position, next);
      // All lower activations are needed later than this one.
      if (b == kNone) return;
      read(b, next);
    }
  }

  Slot& slot(int64_t handle) { return slots.at(static_cast<size_t>(handle)); }

  mutable std::mutex mutex;
  DiskActivationOptions options;
  store::Folder folder;  // outlives the files
  std::vector<std::unique_ptr<store::File>> files;
  std::vector<Slot> slots;
  int64_t late_reads = 0;
  std::string failure;          // of the first transfer that failed
  std::vector<Buffer> buffers;  // last, since transfers end before their files
};

namespace {

DiskActivationOptions checked(DiskActivationOptions options) {
  if (options.buffers < 2) {
    throw ConfigError(fmt::format(
        "DiskActivationOptions::buffers is {}; it must be at least 2: one in use, one on its way.",
        options.buffers));
  }
  if (options.file_bytes < 1) {
    throw ConfigError(fmt::format("DiskActivationOptions::file_bytes is {}; it must be positive.",
                                  options.file_bytes));
  }
  return options;
}

}  // namespace

DiskActivations::DiskActivations(DiskActivationOptions options)
    : impl_(std::make_unique<Impl>(checked(std::move(options)))) {}
DiskActivations::~DiskActivations() = default;

int64_t DiskActivations::put(const at::Tensor& values) {
  check(values);
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  const std::lock_guard lock(impl.mutex);
  impl.refuse_after_failure();
  const size_t index = impl.slots.size();
  Shape shape(values);
  const auto [file, offset] = impl.place(shape.bytes);
  size_t b = impl.replaceable(index, index);
  if (b == Impl::kNone) {  // all are in use: nested functions, or graphs that are retained
    b = impl.buffers.size();
    impl.buffers.emplace_back();
  }
  impl.slots.push_back({.shape = std::move(shape), .file = file, .offset = offset});
  try {
    auto& buffer = impl.assign(b, index);
    const auto& kept = impl.slots.back().shape;
    kept.at_byte(buffer.memory, buffer.begin).copy_(values);
    buffer.transfer = impl.files[file]->write(offset, buffer.data(), kept.bytes);
    buffer.reading = false;
  } catch (...) {
    impl.slots.pop_back();
    if (impl.buffers[b].slot == index) impl.buffers[b].slot = Impl::kNone;
    throw;
  }
  return static_cast<int64_t>(index);
}

at::Tensor DiskActivations::get(int64_t handle) {
  const at::NoGradGuard no_grad;
  auto& impl = *impl_;
  const std::lock_guard lock(impl.mutex);
  impl.refuse_after_failure();
  const auto index = static_cast<size_t>(handle);
  auto& slot = impl.slot(handle);
  if (slot.buffer == Impl::kNone) {
    ++impl.late_reads;
    size_t b = impl.replaceable(index, index);
    if (b == Impl::kNone) {
      b = impl.buffers.size();
      impl.buffers.emplace_back();
    }
    impl.read(b, index);
  }
  slot.used = true;
  impl.read_ahead(index);
  auto& buffer = impl.buffers[slot.buffer];
  // A write may go on: it only reads the memory too.
  if (std::exchange(buffer.reading, false)) impl.wait(buffer);
  return slot.shape.at_byte(buffer.memory, buffer.begin);
}

void DiskActivations::done(int64_t handle) {
  const std::lock_guard lock(impl_->mutex);
  impl_->slot(handle).used = false;
}

void DiskActivations::drop(int64_t handle) noexcept {
  const std::lock_guard lock(impl_->mutex);
  auto& slot = impl_->slots[static_cast<size_t>(handle)];
  slot.dropped = true;
  if (slot.buffer != Impl::kNone) {
    auto& buffer = impl_->buffers[slot.buffer];
    buffer.transfer = {};  // waits; whether it went well does not matter any more
    buffer.slot = Impl::kNone;
  }
  pop_dropped(impl_->slots);
}

store::FileCounts DiskActivations::counts() const {
  const std::lock_guard lock(impl_->mutex);
  store::FileCounts sum;
  for (const auto& file : impl_->files) {
    const auto counts = file->counts();
    sum.read += counts.read;
    sum.written += counts.written;
  }
  return sum;
}

int64_t DiskActivations::late_reads() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->late_reads;
}

}  // namespace zero
