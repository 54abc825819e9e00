// Compares two views of checkpoints.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "zero/checkpoint/foreign/checkpoint_view.h"

namespace zero::foreign {

namespace {

// Returns how two tensors differ, or nothing.
std::string difference(const LazyTensor& a, const LazyTensor& b, double tolerance) {
  if (a.shape != b.shape)
    return fmt::format("have the shapes [{}] and [{}]", fmt::join(a.shape, ","),
                       fmt::join(b.shape, ","));
  auto x = a.read().contiguous();
  auto y = b.read().contiguous();
  if (a.dtype == b.dtype &&
      (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0))
    return {};
  if (a.dtype != b.dtype && tolerance == 0) {
    return fmt::format("are of {} and {}", c10::toString(a.dtype), c10::toString(b.dtype));
  }
  const auto apart = (x.to(at::kDouble) - y.to(at::kDouble)).abs();
  // A NaN counts as different from every number, whatever the tolerance is.
  const auto count = apart.numel() - apart.le(tolerance).sum().item<int64_t>();
  if (count > 0)
    return fmt::format("differ in {} of {} elements, by up to {:.3g}", count, apart.numel(),
                       apart.max().item<double>());
  return tolerance == 0 ? "differ in the signs of zeros" : "";
}

// Returns all weights and buffers by all their names, since programs differ in which tensors are
// buffers.
std::map<std::string, const LazyTensor*> values_of(const CheckpointView& view) {
  std::map<std::string, const LazyTensor*> values;
  for (const auto& [name, buffer] : view.buffers) values[name] = &buffer;
  for (const auto& each : view.parameters) {
    values[each.name] = &each.weights();
    for (const auto& other : each.other_names) values[other] = &each.weights();
  }
  return values;
}

// Returns the parameters that an optimizer trains.
std::map<std::string, const CheckpointView::Parameter*> trained_of(const CheckpointView& view) {
  std::map<std::string, const CheckpointView::Parameter*> trained;
  for (const auto& each : view.parameters) {
    if (!each.optimizer.empty()) trained[each.name] = &each;
  }
  return trained;
}

// Calls `both` for each entry that two maps share, and adds a sentence for each entry that only one
// of them has.
template <class Map, class Both>
void pair_up(const Map& ours, const Map& theirs, std::vector<std::string>& found, const char* what,
             Both both) {
  for (const auto& [name, value] : ours) {
    if (const auto other = theirs.find(name); other != theirs.end()) {
      both(name, value, other->second);
    } else {
      found.push_back(fmt::format("{}{}: only in the first", name, what));
    }
  }
  for (const auto& [name, value] : theirs) {
    if (!ours.contains(name)) found.push_back(fmt::format("{}{}: only in the second", name, what));
  }
}

}  // namespace

std::vector<std::string> differences(const CheckpointView& a, const CheckpointView& b,
                                     double tolerance) {
  std::vector<std::string> found;
  const auto compare = [&](const std::string& what, const auto& x, const auto& y) {
    if (x != y) found.push_back(fmt::format("{}: {} and {}", what, x, y));
  };
  const auto scale_of = [](const CheckpointView& view) {
    return view.loss_scale ? fmt::format("{} after {} clean steps", view.loss_scale->scale,
                                         view.loss_scale->clean)
                           : std::string("none");
  };
  const auto tensors = [&](const std::string& what, const LazyTensor& x, const LazyTensor& y) {
    if (const auto text = difference(x, y, tolerance); !text.empty())
      found.push_back(fmt::format("{} {}", what, text));
  };
  compare("steps", a.steps, b.steps);
  compare("loss scale", scale_of(a), scale_of(b));
  pair_up(values_of(a), values_of(b), found, "",
          [&](const std::string& name, const LazyTensor* x, const LazyTensor* y) {
            tensors(name, *x, *y);
          });
  // Without own buffers on either side there is nothing more; another number of ranks has others.
  for (size_t r = 0; r < std::min(a.other_ranks.size(), b.other_ranks.size()); ++r) {
    pair_up(a.other_ranks[r].buffers, b.other_ranks[r].buffers, found,
            fmt::format(" of rank {}", r + 1).c_str(),
            [&](const std::string& name, const LazyTensor& x, const LazyTensor& y) {
              tensors(fmt::format("{} of rank {}", name, r + 1), x, y);
            });
  }
  std::set<std::pair<int64_t, int64_t>> compared;
  const auto states = [&](const std::string& name, const CheckpointView::Parameter* x,
                          const CheckpointView::Parameter* y) {
    compare(name + " optimizer", x->optimizer, y->optimizer);
    compare(name + " steps", x->steps, y->steps);
    auto mine = x->states;
    auto others = y->states;
    for (const auto* weights : {"parameter", "master"}) {
      mine.erase(weights);
      others.erase(weights);
    }
    pair_up(mine, others, found, (" of " + name).c_str(),
            [&](const std::string& state, const LazyTensor& p, const LazyTensor& q) {
              tensors(name + " " + state, p, q);
            });
    // Groups may have other numbers in the other view. Each pair of groups is compared once.
    if (!compared.emplace(x->group, y->group).second) return;
    const auto p = nlohmann::json::parse(a.groups.at(static_cast<size_t>(x->group)));
    const auto q = nlohmann::json::parse(b.groups.at(static_cast<size_t>(y->group)));
    for (const auto& [key, value] : p["params"].items()) {
      if (q["params"].contains(key)) {
        compare(fmt::format("{} (group {}) {}", name, x->group, key), value.dump(),
                q["params"][key].dump());
      }
    }
  };
  pair_up(trained_of(a), trained_of(b), found, " states", states);
  return found;
}

}  // namespace zero::foreign
