#include "zero/engine/reduction_queue.h"

#include <exception>

#include "zero/base/error.h"
#include "zero/engine/gradient_sums.h"

namespace zero {

ReductionQueue::~ReductionQueue() {
  try {
    {
      // Memory goes back to this stream, even that of sums that the caller's stream still reads.
      const SideScope on(context_.side, context_.mark);
      for (auto& reduction : under_way_) {
        try {
          reduction.collectives.wait();
        } catch (const std::exception&) {  // the group has failed, which others report
        }
      }
    }
    if (arrays_ == Arrays::callers && !under_way_.empty()) wait_for(context_.side, context_.mark);
  } catch (const std::exception&) {  // the device has failed
  }
}

void ReductionQueue::start(Reduction reduction, bool over_replicas,
                           const std::optional<comm::LinkWire>& wire) {
  auto& shards = *context_.placement.shards;
  auto* replicas = over_replicas ? context_.replicas() : nullptr;
  const int64_t unit = reduction.unit;
  at::Tensor partial;
  if (replicas != nullptr) {
    const auto dtype = context_.gradient_form(unit).partial;
    if (shards.size() == 1) {
      partial = reduction.bucket.array;
    } else if (dtype == reduction.output.scalar_type()) {
      partial = reduction.output;
    } else {
      partial = reduction.partial = context_.pool.take(reduction.output.numel(), dtype);
    }
  }
  reduction.collectives =
      PhasedReduction(shards, replicas, reduction.bucket.array, std::move(partial),
                      reduction.output, context_.label(unit), wire);
  under_way_.push_back(std::move(reduction));
}

void ReductionQueue::advance(size_t newest) {
  size_t done = 0;  // the oldest ones: one with fewer phases may have to wait for an earlier one
  for (size_t i = 0; i + newest < under_way_.size(); ++i) {
    if (under_way_[i].collectives.advance() && done == i) ++done;
  }
  for (; done > 0; --done) {
    auto reduction = std::move(under_way_.front());
    under_way_.pop_front();
    deliver(std::move(reduction));
  }
}

void ReductionQueue::complete() {
  while (!under_way_.empty()) advance(0);
}

void ReductionQueue::deliver(Reduction reduction) const {
  reduction.collectives = {};
  if (reduction.partial.defined()) context_.pool.give(std::move(reduction.partial));
  reduction.partial = at::Tensor();
  const auto& form = context_.gradient_form(reduction.unit);
  const auto& output = reduction.output;
  if (form.rounds && output.scalar_type() != form.reduced) output.copy_(output.to(form.reduced));
  if (auto* sums = reduction.sums) {
    sums->store_or_add(std::move(reduction));
  } else if (reduction.bucket.pooled) {
    context_.pool.give(std::move(reduction.bucket));
  }
}

void ReductionQueue::drop() {
  if (under_way_.empty()) return;
  {
    const SideScope on(context_.side, context_.mark);
    for (auto& reduction : under_way_) {
      try {
        reduction.collectives.wait();
      } catch (const CommError&) {  // the group has failed, which the next collective reports
      }
      reduction.collectives = {};
      if (reduction.partial.defined()) context_.pool.give(std::move(reduction.partial));
      if (auto* sums = reduction.sums) {
        sums->drop(std::move(reduction));
      } else if (reduction.bucket.pooled) {
        context_.pool.give(std::move(reduction.bucket));
      }
    }
    under_way_.clear();
  }
  if (arrays_ == Arrays::callers) wait_for(context_.side, context_.mark);
}

}  // namespace zero
