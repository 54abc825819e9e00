#include "zero/engine/replicas.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/comm/gather_records.h"
#include "zero/device/memory.h"
#include "zero/engine/flows.h"
#include "zero/paging/pager.h"

namespace zero {

namespace {

int64_t hash_of_values(const at::Tensor& values) {
  const auto here = values.cpu();
  return static_cast<int64_t>(
      zero::hash_of({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()}));
}

/// Returns those of the ranks first, first + stride, ... whose number `index` differs from the most
/// frequent value.
std::vector<int> outliers(const std::vector<int64_t>& all, int ranks, size_t index, int first,
                          int stride) {
  const size_t count = all.size() / static_cast<size_t>(ranks);
  const auto of = [&](int rank) { return all[static_cast<size_t>(rank) * count + index]; };
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

std::vector<Divergence> diverged_parameters(const EnginePlan& plan, const Flows& flows) {
  const auto& layout = plan.layout();
  auto& group = plan.group();
  const auto& table = flows.table();
  // Ranks r, r + stride, ... hold the same parameters.
  const bool sharded = plan.placement().sharded.parameters;
  const int stride = sharded ? table.group().size() : 1;
  if (group.size() <= stride) return {};
  // Updates that `step` has left must end before their parameters are read. A delayed update writes
  // elsewhere, so it need not.
  if (!flows.schedule().delayed()) flows.schedule().finish();
  const auto held = [&](int64_t unit) {
    return sharded ? table.read(unit, State::parameters) : table.whole(unit);
  };
  std::vector<int64_t> hashes;
  for (int64_t u = 0; u < layout.unit_count(); ++u) hashes.push_back(hash_of_values(held(u)));
  const auto all = comm::gather_arrays<int64_t>(group, hashes, "checksums of units");
  const auto differing = [&](const std::vector<int64_t>& numbers, size_t index) {
    std::vector<int> ranks;
    for (int first = 0; first < stride; ++first) {
      const auto found = outliers(numbers, group.size(), index, first, stride);
      ranks.insert(ranks.end(), found.begin(), found.end());
    }
    std::ranges::sort(ranks);
    return ranks;
  };
  // Finds the parameters that differ in the units that differ.
  std::vector<int64_t> parameters;
  std::vector<int64_t> parts;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    if (differing(all, static_cast<size_t>(u)).empty()) continue;
    const auto array = held(u);
    const auto& owned = table.plan(u).owned;
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
  const auto of_parameters = comm::gather_arrays<int64_t>(group, parts, "checksums of parameters");
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto ranks = differing(of_parameters, i);
    if (!ranks.empty()) found.push_back({plan.model().name(parameters[i]), std::move(ranks)});
  }
  return found;
}

// On a rank whose user has not written a unit, the unit is as its owners store it.
void check_writes(const EnginePlan& plan, const Flows& flows, std::string_view when) {
  auto& group = plan.group();
  const auto& layout = plan.layout();
  if (group.size() == 1) return;
  flows.schedule().finish();
  const auto written =
      comm::flags_of_any_rank(group, flows.writes().written_units(), "units written");
  auto* pager = flows.gather().pager();
  const auto dirty = pager != nullptr ? pager->dirty() : std::vector<int64_t>{};
  std::vector<int64_t> parameters;
  std::vector<int64_t> hashes;
  for (int64_t u = 0; u < layout.unit_count(); ++u) {
    if (written[static_cast<size_t>(u)] == 0) continue;
    const auto stored = flows.gather().full(u);
    for (const auto& segment : layout.unit(u).segments) {
      auto values = stored;
      if (std::ranges::find(dirty, segment.parameter) != dirty.end())
        values = tensor_at(pager->data(u), stored.numel(), stored.scalar_type(), stored.device());
      parameters.push_back(segment.parameter);
      hashes.push_back(hash_of_values(values.narrow(0, segment.offset, segment.numel)));
    }
  }
  const auto all = comm::gather_arrays<int64_t>(group, hashes, "checksums of what was written");
  std::vector<Divergence> found;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto ranks = outliers(all, group.size(), i, 0, 1);
    if (!ranks.empty()) found.push_back({plan.model().name(parameters[i]), std::move(ranks)});
  }
  if (found.empty()) return;
  throw Error(fmt::format(
      "What was written to parameters {} is not the same on all ranks: {}. (Of two ranks the "
      "second is named.) Write the same on every rank; or write inside zero::Gathered with "
      "modifier_rank 0, which gives rank 0's values to all, also now.",
      when, text_of(found)));
}

void check_given(comm::Group& group, std::string_view function, std::string_view parameter,
                 int64_t value) {
  const Hash hash = Hash().add(parameter).add(value);
  const auto label = fmt::format("{} {}", function, parameter);
  const auto all = comm::gather_records(group, static_cast<int64_t>(hash.value()), label);
  const auto others = outliers(all, group.size(), 0, 0, 1);
  if (others.empty()) return;
  throw Error(fmt::format(
      "{} was not given the same on all ranks: {}. (Of two ranks the second is named.) Give every "
      "rank the same; what one rank alone has goes to all by comm::Group::broadcast.",
      function, text_of({{std::string(parameter), others}})));
}

void check_given(comm::Group& group, std::string_view function, std::string_view parameter,
                 const at::Tensor& value) {
  if (group.size() == 1) return;
  Hash hash;
  if (value.defined()) {
    const auto copy = at::empty(value.sizes(), at::TensorOptions(at::kFloat)).copy_(value.detach());
    for (const auto size : value.sizes()) hash.add(size);
    hash.add(hash_of_values(copy));
  }
  check_given(group, function, parameter, static_cast<int64_t>(hash.value()));
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
