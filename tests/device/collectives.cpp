#include "tests/device/collectives.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <utility>

#include "tests/device/machine.h"
#include "tests/device/operators.h"

namespace zero::simulated {

namespace {

constexpr std::chrono::seconds kPatience(60);

at::Tensor flat(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous(), "simulated device: a collective of a tensor of strides ",
              tensor.strides(), ", which is not contiguous");
  return shown_to_tasks(tensor).view({-1});
}

// Collectives over tensors of the CPU.
at::Tensor sum(const std::vector<at::Tensor>& terms) {
  const auto type = terms[0].scalar_type();
  const auto wide = c10::isIntegralType(type, /*includeBool=*/true) ? at::kLong
                    : type == at::kDouble                           ? at::kDouble
                                                                    : at::kFloat;
  auto total = terms[0].to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (size_t i = 1; i < terms.size(); ++i) total.add_(terms[i].to(wide));
  return total;
}

}  // namespace

void Collectives::all_gather(int rank, const at::Tensor& slice, const at::Tensor& whole) {
  TORCH_CHECK(whole.numel() == slice.numel() * static_cast<int64_t>(parts_.size()),
              "simulated device: all_gather of ", slice.numel(), " elements a rank into ",
              whole.numel());
  meet(rank, {"all_gather", slice, whole}, [](size_t r, const std::vector<Part>& parts) {
    Work work;
    std::vector<std::pair<at::Tensor, at::Tensor>> copies;
    const int64_t count = parts[r].in.numel();
    for (size_t from = 0; from < parts.size(); ++from) {
      const auto& slice = parts[from].in;
      const auto place =
          parts[r].out.view({-1}).narrow(0, static_cast<int64_t>(from) * count, count);
      if (place.const_data_ptr() == slice.const_data_ptr()) continue;  // it lies there already
      copies.emplace_back(flat(slice), flat(place));
      work.ranges.push_back(range_of(slice, false));
      work.ranges.push_back(range_of(place, true));
    }
    work.body = [copies = std::move(copies)] {
      for (const auto& [slice, place] : copies) place.copy_(slice);
    };
    return work;
  });
}

void Collectives::reduce_scatter(int rank, const at::Tensor& whole, const at::Tensor& slice) {
  TORCH_CHECK(whole.numel() == slice.numel() * static_cast<int64_t>(parts_.size()),
              "simulated device: reduce_scatter of ", whole.numel(), " elements into ",
              slice.numel(), " a rank");
  meet(rank, {"reduce_scatter", whole, slice}, [](size_t r, const std::vector<Part>& parts) {
    Work work;
    std::vector<at::Tensor> terms;
    const int64_t count = parts[r].out.numel();
    for (const Part& part : parts) {
      const auto term = part.in.view({-1}).narrow(0, static_cast<int64_t>(r) * count, count);
      terms.push_back(flat(term));
      work.ranges.push_back(range_of(term, false));
    }
    work.ranges.push_back(range_of(parts[r].out, true));
    work.body = [terms = std::move(terms), slice = flat(parts[r].out)] { slice.copy_(sum(terms)); };
    return work;
  });
}

// Each rank adds up a slice and writes it to all, so that no two tasks touch the same bytes.
void Collectives::all_reduce(int rank, const at::Tensor& tensor) {
  meet(rank, {"all_reduce", tensor, tensor}, [](size_t r, const std::vector<Part>& parts) {
    Work work;
    std::vector<at::Tensor> terms;
    const auto ranks = static_cast<int64_t>(parts.size());
    const int64_t numel = parts[r].in.numel();
    const int64_t begin = numel * static_cast<int64_t>(r) / ranks;
    const int64_t end = numel * (static_cast<int64_t>(r) + 1) / ranks;
    for (const Part& part : parts) {
      const auto term = part.in.view({-1}).narrow(0, begin, end - begin);
      terms.push_back(flat(term));
      work.ranges.push_back(range_of(term, true));
    }
    work.body = [terms = std::move(terms)] {
      const auto total = sum(terms);
      for (const auto& term : terms) term.copy_(total);
    };
    return work;
  });
}

void Collectives::broadcast(int rank, const at::Tensor& tensor, int root) {
  meet(rank, {"broadcast from " + std::to_string(root), tensor, tensor},
       [from = static_cast<size_t>(root)](size_t r, const std::vector<Part>& parts) {
         if (r == from) return Work{{range_of(parts[r].in, false)}, [] {}};
         return Work{
             {range_of(parts[from].in, false), range_of(parts[r].out, true)},
             [source = flat(parts[from].in), to = flat(parts[r].out)] { to.copy_(source); }};
       });
}

void Collectives::meet(int rank, Part part, const MakeWork& make) {
  part.host = current_device();
  part.stream = current_actor(part.in.device().index());
  part.before = Machine::instance().record(part.stream);
  std::unique_lock lock(mutex_);
  parts_.at(static_cast<size_t>(rank)) = std::move(part);
  const int64_t round = round_;
  if (++arrived_ < parts_.size()) {
    const bool met = all_here_.wait_for(lock, kPatience, [&] { return round_ != round; });
    TORCH_CHECK(met, "simulated device: rank ", rank, " calls ",
                parts_[static_cast<size_t>(rank)].call, " and has waited a minute; ", arrived_,
                " of ", parts_.size(), " ranks have come");
  } else {
    failure_ = mismatch();
    if (failure_.empty()) {
      try {
        enqueue(make);
      } catch (const std::exception& error) {
        failure_ = error.what();
      }
    }
    for (Part& each : parts_) each = {};
    arrived_ = 0;
    ++round_;
    all_here_.notify_all();
  }
  // No rank can begin the next round's end before all have left this one: it needs all of them.
  TORCH_CHECK(failure_.empty(), failure_);
}

std::string Collectives::mismatch() const {
  for (size_t r = 1; r < parts_.size(); ++r) {
    const Part &a = parts_[0], &b = parts_[r];
    if (a.call == b.call && a.in.numel() == b.in.numel() && a.out.numel() == b.out.numel() &&
        a.in.scalar_type() == b.in.scalar_type() && a.out.scalar_type() == b.out.scalar_type()) {
      continue;
    }
    const auto text = [](const Part& part) {
      return part.call + " of " + std::to_string(part.in.numel()) + " elements";
    };
    return "simulated device: rank 0 calls " + text(a) + ", rank " + std::to_string(r) + " " +
           text(b);
  }
  return {};
}

// Each rank's part is enqueued in its name: what this thread's host knows is no concern of others.
void Collectives::enqueue(const MakeWork& make) {
  auto& machine = Machine::instance();
  std::vector<Mark> after;
  for (size_t r = 0; r < parts_.size(); ++r) {
    const Part& part = parts_[r];
    const HostScope as(part.host);
    for (const Part& other : parts_) machine.order(part.stream, other.before);
    Work work = make(r, parts_);
    machine.launch(part.stream, part.call + " of rank " + std::to_string(r), work.ranges,
                   std::move(work.body));
    after.push_back(machine.record(part.stream));
  }
  for (const Part& part : parts_) {
    const HostScope as(part.host);
    for (const Mark& mark : after) machine.order(part.stream, mark);
  }
}

}  // namespace zero::simulated
