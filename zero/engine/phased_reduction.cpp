#include "zero/engine/phased_reduction.h"

#include <utility>

namespace zero {

PhasedReduction::PhasedReduction(comm::Group& shards, comm::Group* replicas,
                                 const at::Tensor& input, at::Tensor partial, at::Tensor output,
                                 std::string_view label, const std::optional<comm::LinkWire>& wire)
    : replicas_(replicas), partial_(std::move(partial)), output_(std::move(output)), label_(label) {
  if (replicas_ == nullptr) {
    work_ = shards.reduce_scatter(output_, input, label_, wire);
  } else if (!partial_.is_same(input)) {
    work_ = shards.reduce_scatter(partial_, input, label_);
  }
}

PhasedReduction::PhasedReduction(comm::Group& replicas, const at::Tensor& slice,
                                 std::string_view label)
    : replicas_(&replicas), partial_(slice), output_(slice), label_(label) {}

at::Tensor PhasedReduction::part() const {
  const int64_t numel = output_.numel() / replicas_->size();
  return output_.narrow(0, replicas_->rank() * numel, numel);
}

bool PhasedReduction::advance() {
  work_.wait();
  work_ = {};
  if (replicas_ == nullptr || phase_ == Phase::sharing) return true;
  if (phase_ == Phase::shards) {
    work_ = replicas_->reduce_scatter(part(), partial_, label_);
    phase_ = Phase::replicas;
  } else {
    work_ = replicas_->all_gather(output_, part(), label_);
    phase_ = Phase::sharing;
  }
  return false;
}

}  // namespace zero
