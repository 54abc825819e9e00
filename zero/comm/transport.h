// What libzero's own backend does beyond c10d's interface. Group finds it by a dynamic_cast; other
// backends lack it.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "zero/base/ledger.h"
#include "zero/comm/group.h"
#include "zero/comm/traffic.h"

namespace zero::comm {

struct WaitClock;

class Transport {
 public:
  virtual ~Transport() = default;
  /// What the next collective is for: its label, where its copied bytes are counted, and whether
  /// the caller waits for it at once, so that no other thread need be woken to run it.
  virtual void announce(std::string_view label, Collective counted, bool awaited) = 0;
  /// See Group::empty.
  virtual at::Tensor empty(int64_t numel, at::ScalarType dtype, Category category) = 0;
  /// See Group::window.
  virtual std::unique_ptr<Window> window(int64_t bytes, int64_t slots, Category category) = 0;
  /// This rank gives up: its peers get a CommError with `why`, and so does every later call of its
  /// own.
  virtual void abandon(std::string_view why) = 0;

  virtual const std::shared_ptr<Traffic>& traffic() const = 0;
  virtual const std::shared_ptr<Ledger>& ledger() const = 0;
  virtual const std::shared_ptr<WaitClock>& clock() const = 0;
};

}  // namespace zero::comm
