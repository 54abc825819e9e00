// A pager over parameters of this process, with the full units in memory: paging alone, without
// ranks.
#pragma once

#include <torch/types.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "zero/paging/pager.h"

namespace zero::paging {

class LocalSource : public UnitSource {
 public:
  explicit LocalSource(const partition::Layout& layout) : layout_(layout) {
    for (const auto& unit : layout.units()) units_.push_back(at::zeros({unit.bytes()}, at::kByte));
  }
  void gather(int64_t unit, void* destination) override {
    std::memcpy(destination, units_[static_cast<size_t>(unit)].data_ptr(),
                static_cast<size_t>(layout_.unit(unit).bytes()));
    const std::lock_guard lock(mutex_);  // several units may be gathered at once
    gathered.push_back(unit);
  }
  void finish(int64_t) override {}
  char* data(int64_t parameter) {
    const int64_t unit = layout_.unit_of(parameter);
    return static_cast<char*>(units_[static_cast<size_t>(unit)].data_ptr()) +
           layout_.segment_of(parameter).offset * layout_.unit(unit).element_bytes;
  }
  std::vector<int64_t> gathered;

 private:
  const partition::Layout& layout_;
  std::vector<at::Tensor> units_;
  std::mutex mutex_;
};

/// Pages `parameters` as long as it lives.
class Paged {
 public:
  Paged(const std::vector<at::Tensor>& parameters, int64_t unit_bytes, int64_t budget_bytes,
        int64_t prefetch_bytes = 0)
      : layout(describe(parameters), 1, unit_bytes), source(layout) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& storage = parameters[i].storage();
      std::memcpy(source.data(static_cast<int64_t>(i)), storage.data(), storage.nbytes());
    }
    pager = std::make_unique<Pager>(
        layout, parameters, source, ledger,
        PagerOptions{.budget_bytes = budget_bytes, .prefetch_bytes = prefetch_bytes});
  }

  static std::vector<partition::Parameter> describe(const std::vector<at::Tensor>& parameters) {
    std::vector<partition::Parameter> list;
    for (const auto& p : parameters) {
      list.push_back({"p" + std::to_string(list.size()), p.numel(), p.element_size(),
                      static_cast<int64_t>(p.scalar_type())});
    }
    return list;
  }

  partition::Layout layout;
  LocalSource source;
  std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>();
  std::unique_ptr<Pager> pager;
};

}  // namespace zero::paging
