#include "zero/engine/replicas.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "zero/base/hash.h"
#include "zero/engine/engine_impl.h"

namespace zero {

namespace {

int64_t hash_of_values(const at::Tensor& values) {
  const auto here = values.cpu();
  return static_cast<int64_t>(
      zero::hash_of({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()}));
}

/// `mine` of each rank, by rank. Collective.
at::Tensor gathered(comm::Group& group, const std::vector<int64_t>& mine, std::string_view label) {
  const auto count = static_cast<int64_t>(mine.size());
  const auto sent = at::empty({count}, at::kLong);
  std::ranges::copy(mine, sent.mutable_data_ptr<int64_t>());
  auto all = at::empty({group.size(), count}, at::kLong);
  group.all_gather_control(all, sent, label);
  return all;
}

/// Returns those of the ranks first, first + stride, ... whose number `index` differs from the most
/// frequent one.
std::vector<int> outliers(const at::Tensor& all, int64_t index, int first, int stride) {
  const auto ranks = static_cast<int>(all.size(0));
  const auto* numbers = all.const_data_ptr<int64_t>();
  const auto of = [&](int rank) { return numbers[rank * all.size(1) + index]; };
  int most = first;
  int64_t frequency = 0;
  for (int rank = first; rank < ranks; rank += stride) {
    int64_t same = 0;
    for (int other = first; other < ranks; other += stride) same += of(other) == of(rank) ? 1 : 0;
    if (same > frequency) {
      most = rank;
      frequency = same;
    }
  }
  std::vector<int> found;
  for (int rank = first; rank < ranks; rank += stride) {
    if (of(rank) != of(most)) found.push_back(rank);
  }
  return found;
}

}  // namespace

std::vector<Divergence> Engine::diverged_parameters() {
  auto& impl = *impl_;
  const auto& layout = impl.layout;
  // Ranks r, r + stride, ... hold the same.
  const bool sharded = impl.placement.sharded.parameters;
  const int stride = sharded ? impl.placement.shards->size() : 1;
  if (impl.group().size() <= stride) return {};
  // Updates that `step` has left must end before their parameters are read; a delayed update hides
  // what it writes.
  if (!impl.schedule->delayed()) impl.schedule->finish();
  const auto held = [&](int64_t unit) {
    return sharded ? impl.table->read(unit, State::parameters) : impl.table->whole(unit);
  };
  std::vector<int64_t> hashes;
  for (int64_t u = 0; u < layout.unit_count(); ++u) hashes.push_back(hash_of_values(held(u)));
  const auto all = gathered(impl.group(), hashes, "checksums of units");
  const auto differing = [&](const at::Tensor& numbers, int64_t index) {
    std::vector<int> ranks;
    for (int first = 0; first < stride; ++first) {
      const auto found = outliers(numbers, index, first, stride);
      ranks.insert(ranks.end(), found.begin(), found.end());
    }
    std::ranges::sort(ranks);
    return ranks;
  };
  // Finds the parameters that differ in the units that do.
  std::vector<int64_t> parameters;
  std::vector<int64_t> parts;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    if (differing(all, u).empty()) continue;
    const auto array = held(u);
    const auto& owned = impl.table->plan(u).owned;
    for (const auto& segment : layout.unit(u).segments) {
      const auto part = sharded ? partition::intersect(segment.range(), owned) : segment.range();
      const int64_t begin = sharded ? owned.begin : 0;
      parameters.push_back(segment.parameter);
      parts.push_back(
          part.empty() ? 0 : hash_of_values(array.narrow(0, part.begin - begin, part.size())));
    }
  }
  std::vector<Divergence> found;
  if (parts.empty()) return found;
  const auto of_parameters = gathered(impl.group(), parts, "checksums of parameters");
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto ranks = differing(of_parameters, static_cast<int64_t>(i));
    if (!ranks.empty()) found.push_back({impl.model.name(parameters[i]), std::move(ranks)});
  }
  return found;
}

std::string text_of(const std::vector<Divergence>& divergences) {
  constexpr size_t kFew = 4;
  std::string text;
  for (size_t i = 0; i < std::min(kFew, divergences.size()); ++i) {
    const auto& ranks = divergences[i].ranks;
    text += fmt::format("{}{} on rank{} {}", i > 0 ? "; " : "", divergences[i].parameter,
                        ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
  }
  if (divergences.size() > kFew) text += fmt::format("; and {} more", divergences.size() - kFew);
  return text;
}

}  // namespace zero
