// A store keeps the saved inputs of recomputed functions between forward and backward.
//
// Note [Stack of activations]
// Backward asks for activations in the reverse of the order in which forward gave them, so a store
// is a stack: what is put goes on top, and a dropped top frees its place for the next step. Nested
// recomputation puts on top while it takes from below. Other orders (two graphs at a time, a graph
// that backward never visits) are right too; a place is then free once all above it are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "zero/store/file.h"

namespace zero {

/// Is thread-safe. A store serves one rank; several models may share it.
class ActivationStore {
 public:
  virtual ~ActivationStore() = default;
  /// Copies `values` (on the CPU, dense; strides are kept) and returns a handle. The caller may
  /// change or free them at once.
  virtual int64_t put(const at::Tensor& values) = 0;
  /// Returns the values, which are valid until `done` or `drop`. The caller does not write to them.
  virtual at::Tensor get(int64_t handle) = 0;
  /// The caller no longer uses any tensor that `get` returned for it; `get` may be called again.
  virtual void done(int64_t handle) = 0;
  /// The values are not needed any more; the handle is free for another `put`.
  virtual void drop(int64_t handle) noexcept = 0;
};

/// One buffer that every step uses again (ZeRO-R's memory defragmentation, 1910.02054, section
/// 6.3): activations that live long do not lie between those that come and go. The first step
/// measures how large it must be, with memory for each activation; the buffer is made when the next
/// one begins, and again after a step that needed more.
class ContiguousActivations final : public ActivationStore {
 public:
  ContiguousActivations();
  ~ContiguousActivations() override;
  int64_t put(const at::Tensor& values) override;
  at::Tensor get(int64_t handle) override;
  void done(int64_t handle) override;
  void drop(int64_t handle) noexcept override;
  /// Returns the bytes of the buffer.
  int64_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct DiskActivationOptions {
  std::string folder;  ///< on a local disk; the store makes a private one in it
  /// Activations in memory at a time, each as large as the largest: one in use, the others being
  /// written, or read ahead. At least 2.
  int buffers = 3;
  /// Size of each file; another is made when all are full.
  int64_t file_bytes = int64_t{256} << 20;
  store::FileOptions file{};
};

/// Stores activations in files on a local disk. `put` returns as soon as the values are copied to a
/// buffer, from where they are written while forward goes on; `get` reads those below ahead, while
/// the one it returns is used. The last activations of forward are still in their buffers when
/// backward asks for them and are not read. Throws StoreError naming the file, the offset and the
/// system's reason: for a write that fails, from a later call.
class DiskActivations final : public ActivationStore {
 public:
  explicit DiskActivations(DiskActivationOptions options);
  ~DiskActivations() override;
  int64_t put(const at::Tensor& values) override;
  at::Tensor get(int64_t handle) override;
  void done(int64_t handle) override;
  void drop(int64_t handle) noexcept override;
  /// Returns the bytes since construction.
  store::FileCounts counts() const;
  /// `get` calls that had to start their own read.
  int64_t late_reads() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zero
