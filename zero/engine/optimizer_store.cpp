#include "zero/engine/optimizer_store.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <utility>

#include "zero/base/host_memory.h"
#include "zero/engine/flat.h"

namespace zero {

using partition::intersect;
using partition::Range;

namespace {

// Elements of a block that crosses between device and host: it stays in a core's cache.
constexpr int64_t kStagedNumel = 1 << 18;

std::byte* at_byte(const at::Tensor& tensor, int64_t element) {
  return static_cast<std::byte*>(tensor.data_ptr()) +
         element * static_cast<int64_t>(tensor.element_size());
}

Category buffers_at(Tier tier) {
  return tier == Tier::host ? Category::host_buffers : Category::offload_buffers;
}

}  // namespace

StateStream::Unit OptimizerStore::arrays_on_disk(int64_t numel, const StateForm& form,
                                                 bool trainable, int64_t states,
                                                 const OnDisk& on_disk) {
  StateStream::Unit unit{.numel = numel, .arrays = {}, .updated = trainable};
  const bool own_master = trainable && form.own_master();
  const bool doubled = trainable && on_disk.doubled;
  if (form.parameters_at == Tier::disk) {
    unit.arrays.push_back(
        {.dtype = form.dtype, .read = !own_master || form.split, .doubled = doubled});
  }
  if (!trainable) return unit;
  if (form.states_at == Tier::disk) {
    if (own_master) unit.arrays.push_back({.dtype = form.master_dtype()});
    for (int64_t i = 0; i < states; ++i) unit.arrays.push_back({.dtype = at::kFloat});
  }
  if (on_disk.gradients)
    unit.arrays.push_back({.dtype = *on_disk.gradients, .write = false, .doubled = doubled});
  return unit;
}

OptimizerStore::OptimizerStore(const partition::Layout& layout, std::vector<Group> groups,
                               std::vector<size_t> group_of, std::vector<Unit> units,
                               const std::shared_ptr<Ledger>& ledger, HostLink& link,
                               StateStream* disk, bool hides)
    : layout_(layout),
      groups_(std::move(groups)),
      group_of_(std::move(group_of)),
      units_(std::move(units)),
      arrays_(units_.size()),
      link_(link),
      disk_(disk),
      hides_(hides),
      unrevealed_(units_.size(), 0),
      steps_(group_of_.size(), 0) {
  int64_t staged_bytes = 0;
  Tier staged_at = Tier::device;
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    auto& arrays = arrays_[static_cast<size_t>(u)];
    if (unit(u).owned.empty()) continue;
    const int64_t numel = unit(u).owned.size();
    const auto dtype = unit(u).dtype;
    if (!own_master(u)) arrays.master = unit(u).parameters;
    if (hides && !unit(u).parameters_on_disk() && !unit(u).copies_master()) {
      arrays.hidden = host_zeros(numel, dtype, ledger, buffers_at(unit(u).updated_at()));
    } else if (unit(u).crosses() && !unit(u).copies_master()) {
      staged_bytes = std::max(staged_bytes, std::min(numel, kStagedNumel) *
                                                static_cast<int64_t>(c10::elementSize(dtype)));
      staged_at = unit(u).updated_at();
    }
    if (unit(u).states_on_disk()) continue;
    // Parameters and gradients have colour 0.
    const auto zeros = [&](at::ScalarType of, int64_t colour) {
      return host_zeros(
          numel, of, ledger,
          unit(u).states_at == Tier::host ? Category::host_optimizer : Category::optimizer, colour);
    };
    const auto names = static_cast<int64_t>(array_names(u).size());
    if (own_master(u)) arrays.master = zeros(unit(u).master_dtype(), names);
    for (int64_t i = 1; i < names; ++i) arrays.states.push_back(zeros(at::kFloat, i));
  }
  if (staged_bytes > 0)
    staging_ = host_zeros(staged_bytes, at::kByte, ledger, buffers_at(staged_at));
}

bool OptimizerStore::own_master(int64_t unit) const { return this->unit(unit).own_master(); }

std::vector<std::string_view> OptimizerStore::array_names(int64_t unit) const {
  if (units_[static_cast<size_t>(unit)].owned.empty()) return {};
  std::vector<std::string_view> names{"master"};
  const auto states =
      optim::state_names(group_of(layout_.unit(unit).segments.front().parameter).optimizer);
  names.insert(names.end(), states.begin(), states.end());
  return names;
}

int64_t OptimizerStore::place_on_disk(int64_t unit, int64_t index) const {
  const auto& u = this->unit(unit);
  const int64_t before = u.parameters_on_disk() ? 1 : 0;
  if (index == 0 && !own_master(unit)) return before - 1;  // the parameters themselves
  if (!u.states_on_disk()) return -1;
  return before + index - (own_master(unit) ? 0 : 1);
}

int64_t OptimizerStore::place_on_disk(int64_t unit, std::string_view name) const {
  const auto names = array_names(unit);
  return place_on_disk(unit, std::find(names.begin(), names.end(), name) - names.begin());
}

at::Tensor OptimizerStore::array(int64_t unit, std::string_view name) const {
  const auto names = array_names(unit);
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return {};
  if (found == names.begin() && this->unit(unit).split) return joined(unit);
  if (const auto place = place_on_disk(unit, name); place >= 0) return disk_->read(unit, place);
  const auto& arrays = arrays_[static_cast<size_t>(unit)];
  return found == names.begin() ? arrays.master
                                : arrays.states[static_cast<size_t>(found - names.begin() - 1)];
}

namespace {

uint16_t* halves_of(const at::Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }

}  // namespace

at::Tensor OptimizerStore::joined(int64_t unit) const {
  const auto& u = this->unit(unit);
  const auto place = place_on_disk(unit, 0);
  const auto lower =
      place >= 0 ? disk_->read(unit, place) : arrays_[static_cast<size_t>(unit)].master;
  const auto upper = u.parameters_on_disk() ? disk_->read(unit, 0) : u.parameters;
  auto values = at::empty({u.owned.size()}, at::kFloat);
  optim::join(halves_of(upper), halves_of(lower), values.mutable_data_ptr<float>(), values.numel());
  return values;
}

void OptimizerStore::put_halves(int64_t unit, int64_t begin, const at::Tensor& values) {
  const auto& u = this->unit(unit);
  const int64_t numel = values.numel();
  const auto whole = values.to(at::kFloat).contiguous();
  const auto place = place_on_disk(unit, 0);
  const auto lower = place >= 0 ? at::empty({numel}, at::kShort)
                                : arrays_[static_cast<size_t>(unit)].master.narrow(0, begin, numel);
  const auto upper =
      u.parameters_on_disk() ? at::empty({numel}, u.dtype) : u.parameters.narrow(0, begin, numel);
  optim::split(whole.const_data_ptr<float>(), halves_of(upper), halves_of(lower), numel);
  if (place >= 0) disk_->write(unit, place, begin, lower);
  if (u.parameters_on_disk()) disk_->write(unit, 0, begin, upper);
  follow(unit, begin, numel);
}

void OptimizerStore::put(int64_t unit, std::string_view name, const at::Tensor& values) {
  if (name == "master" && this->unit(unit).split) {
    put_halves(unit, 0, values);
    return;
  }
  if (const auto place = place_on_disk(unit, name); place >= 0)
    disk_->write(unit, place, 0, values);
}

void OptimizerStore::replace(int64_t unit, std::string_view name, const at::Tensor& values) {
  if (place_on_disk(unit, name) >= 0 || (name == "master" && this->unit(unit).split)) {
    put(unit, name, values);
  } else {
    array(unit, name).copy_(values);
  }
}

at::Tensor OptimizerStore::narrowed(int64_t unit, const at::Tensor& parameter) const {
  auto made = parameter.detach().to(this->unit(unit).dtype);
  if (this->unit(unit).split) {
    const auto values = flat_view(parameter);
    optim::split(values.const_data_ptr<float>(), halves_of(flat_view(made)), nullptr,
                 values.numel());
  }
  return made;
}

void OptimizerStore::set_master(int64_t parameter, const at::Tensor& values) {
  const int64_t u = layout_.unit_of(parameter);
  const auto& unit = units_[static_cast<size_t>(u)];
  const auto& segment = layout_.segment_of(parameter);
  const auto mine = intersect(segment.range(), unit.owned);
  if (mine.empty()) return;
  const auto part = values.narrow(0, mine.begin - segment.offset, mine.size());
  const int64_t begin = mine.begin - unit.owned.begin;
  if (unit.split) {
    put_halves(u, begin, part);
  } else if (const auto place = place_on_disk(u, "master"); place >= 0) {
    disk_->write(u, place, begin, part.to(at::kFloat));
  } else {
    array(u, "master").narrow(0, begin, mine.size()).copy_(part);
    follow(u, begin, mine.size());
  }
}

void OptimizerStore::follow(int64_t unit, int64_t begin, int64_t numel) {
  const auto& u = this->unit(unit);
  const auto& hidden = arrays_[static_cast<size_t>(unit)].hidden;
  if (!hidden.defined() || (u.own_master() && !u.split)) return;
  link_.copy(at_byte(hidden, begin), u.updated_at(), at_byte(u.parameters, begin), u.parameters_at,
             numel * static_cast<int64_t>(hidden.element_size()));
}

void OptimizerStore::follow(int64_t unit) { follow(unit, 0, this->unit(unit).owned.size()); }

void OptimizerStore::refresh_master(int64_t parameter) {
  const int64_t u = layout_.unit_of(parameter);
  const auto& unit = units_[static_cast<size_t>(u)];
  const auto mine = intersect(layout_.segment_of(parameter).range(), unit.owned);
  if (mine.empty()) return;
  const int64_t begin = mine.begin - unit.owned.begin;
  follow(u, begin, mine.size());
  if (!own_master(u)) return;
  const auto parameters = unit.parameters_on_disk() ? disk_->read(u, 0) : unit.parameters;
  auto written = parameters.narrow(0, begin, mine.size());
  if (unit.split) {
    const auto place = place_on_disk(u, 0);
    const auto all = place >= 0 ? disk_->read(u, place) : arrays_[static_cast<size_t>(u)].master;
    const auto lower = all.narrow(0, begin, mine.size());
    optim::fit_lower(halves_of(written), halves_of(lower), mine.size());
    if (place >= 0) disk_->write(u, place, begin, lower);
    return;
  }
  if (unit.crosses()) {
    const auto here = at::empty_like(written);
    link_.copy(here.data_ptr(), unit.states_at, written.const_data_ptr(), unit.parameters_at,
               static_cast<int64_t>(written.nbytes()));
    written = here;
  }
  const auto whole = array(u, "master");
  auto master = whole.narrow(0, begin, mine.size());
  master.copy_(
      at::where(master.to(written.scalar_type()) == written, master, written.to(at::kFloat)));
  put(u, "master", whole);
}

HostTraffic OptimizerStore::host_bytes(int64_t unit) const {
  const auto& u = this->unit(unit);
  if (!u.crosses()) return {};
  const int64_t bytes = u.owned.size() * static_cast<int64_t>(c10::elementSize(u.dtype));
  if (u.states_at == Tier::host) return {.down = 0, .up = bytes};
  return {.down = bytes, .up = own_master(unit) || hides_ ? 0 : bytes};
}

void OptimizerStore::begin_update() {
  rates_.clear();
  for (const auto& group : groups_) rates_.push_back(group.lr);
}

void OptimizerStore::reveal(int64_t unit) {
  if (std::exchange(unrevealed_[static_cast<size_t>(unit)], uint8_t{0}) == 0 || !hides_) return;
  const auto& target = this->unit(unit);
  const auto& arrays = arrays_[static_cast<size_t>(unit)];
  if (target.parameters_on_disk()) {
    disk_->wait_written(unit);
    disk_->flip(unit, 0);
    return;
  }
  const auto& updated = arrays.hidden.defined() ? arrays.hidden : arrays.master;
  link_.copy(target.parameters.data_ptr(), target.parameters_at, updated.const_data_ptr(),
             target.updated_at(), static_cast<int64_t>(updated.nbytes()));
}

void OptimizerStore::update(int64_t unit, const at::Tensor& gradient, double gradient_scale,
                            const std::vector<uint8_t>& present) {
  const auto& target = units_[static_cast<size_t>(unit)];
  const auto& arrays = arrays_[static_cast<size_t>(unit)];
  const auto& segments = layout_.unit(unit).segments;
  for (const auto& segment : segments) {
    if (present[static_cast<size_t>(segment.parameter)] != 0)
      ++steps_[static_cast<size_t>(segment.parameter)];
  }
  // Neighbours with the same hyper-parameters and step are one run, the padding between them
  // included: it is zero and stays so.
  struct Run {
    Range owned;  // counted from the first owned element
    int64_t parameter;
  };
  c10::SmallVector<Run, 8> runs;
  size_t first = 0;
  while (first < segments.size()) {
    const auto parameter = static_cast<size_t>(segments[first].parameter);
    size_t last = first;
    const auto joins = [&](size_t next) {
      const auto other = static_cast<size_t>(segments[next].parameter);
      return present[other] != 0 && group_of_[other] == group_of_[parameter] &&
             steps_[other] == steps_[parameter];
    };
    if (present[parameter] == 0) {
      ++first;
      continue;
    }
    while (last + 1 < segments.size() && joins(last + 1)) ++last;
    const auto mine = intersect({segments[first].offset, segments[last].range().end}, target.owned);
    if (!mine.empty()) {
      runs.push_back({{mine.begin - target.owned.begin, mine.end - target.owned.begin},
                      segments[first].parameter});
    }
    first = last + 1;
  }
  if (runs.empty()) return;

  const bool hides = arrays.hidden.defined();
  const bool own = own_master(unit);
  const bool split = target.split;
  const auto& in_memory = hides ? arrays.hidden : target.parameters;
  unrevealed_[static_cast<size_t>(unit)] = 1;
  // The new parameters leave the block in which they were made for the other memory.
  const bool crosses = target.crosses() && !hides_;
  const bool staged = crosses && !target.copies_master();
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(target.dtype));
  const auto gradient_dtype =
      target.gradient_on_disk ? *target.gradient_on_disk : gradient.scalar_type();
  const auto names = static_cast<int64_t>(array_names(unit).size());
  const auto apply = [&](const StateStream::Block& block) {
    // The array `index` of array_names from element `begin` on.
    const auto values = [&](int64_t index, int64_t begin) -> void* {
      const auto dtype = index == 0 ? target.master_dtype() : at::kFloat;
      const auto offset = (begin - block.begin) * static_cast<int64_t>(c10::elementSize(dtype));
      if (const auto place = place_on_disk(unit, index); place >= 0)
        return block.arrays[static_cast<size_t>(place)] + offset;
      if (index == 0 && !own && staged) return at_byte(staging_, offset);
      const auto& array = index > 0 ? arrays.states[static_cast<size_t>(index - 1)]
                          : own     ? arrays.master
                                    : in_memory;
      return at_byte(array, begin);
    };
    const auto parameters = [&](int64_t begin) -> void* {
      if (staged) return at_byte(staging_, (begin - block.begin) * element_bytes);
      if (!target.parameters_on_disk()) return at_byte(in_memory, begin);
      return block.arrays[0] + (begin - block.begin) * element_bytes;
    };
    const auto gradients = [&](int64_t begin) -> const void* {
      if (!target.gradient_on_disk) return at_byte(gradient, begin);
      return block.arrays.back() +
             (begin - block.begin) * static_cast<int64_t>(c10::elementSize(gradient_dtype));
    };
    int64_t updated = 0;
    for (const auto& run : runs)
      updated += std::max<int64_t>(0, intersect(run.owned, {block.begin, block.end}).size());
    const int64_t block_bytes = (block.end - block.begin) * element_bytes;
    const bool narrows = own && target.dtype != at::kFloat;
    if (staged && !own) {
      link_.copy(parameters(block.begin), target.updated_at(),
                 at_byte(target.parameters, block.begin), target.parameters_at, block_bytes);
    }
    if (narrows && !split && (target.parameters_on_disk() || hides || staged) &&
        updated < block.end - block.begin) {
      // What is not updated is written all the same: it is the rounded master.
      const auto all = [&](void* data, at::ScalarType dtype) {
        return at::from_blob(data, {block.end - block.begin}, at::TensorOptions().dtype(dtype));
      };
      all(parameters(block.begin), target.dtype).copy_(all(values(0, block.begin), at::kFloat));
    }
    for (const auto& run : runs) {
      const auto mine = intersect(run.owned, {block.begin, block.end});
      if (mine.empty()) continue;
      optim::Range range{.numel = mine.size(),
                         .gradient = gradients(mine.begin),
                         .gradient_dtype = gradient_dtype};
      if (split) {
        range.lower = static_cast<uint16_t*>(values(0, mine.begin));
      } else {
        range.master = static_cast<float*>(values(0, mine.begin));
      }
      for (int64_t i = 1; i < names; ++i)
        range.state[static_cast<size_t>(i - 1)] = static_cast<float*>(values(i, mine.begin));
      if (narrows) {
        range.parameter = parameters(mine.begin);
        range.parameter_dtype = target.dtype;
      }
      const auto group = group_of_[static_cast<size_t>(run.parameter)];
      optim::update(groups_[group].optimizer, steps_[static_cast<size_t>(run.parameter)],
                    rates_[group], gradient_scale, range);
    }
    if (crosses) {
      const void* made = staged ? parameters(block.begin) : values(0, block.begin);
      link_.copy(at_byte(target.parameters, block.begin), target.parameters_at, made,
                 target.updated_at(), block_bytes);
    }
  };
  // SGD without momentum on fp32 parameters in memory has no states on disk.
  if (target.parameters_on_disk() || target.gradient_on_disk ||
      (target.states_on_disk() && names > (own ? 0 : 1))) {
    disk_->for_each_block(unit, apply, !staged);
  } else {
    const int64_t numel = target.owned.size();
    const int64_t step = crosses ? kStagedNumel : numel;
    for (int64_t begin = 0; begin < numel; begin += step)
      apply({.begin = begin, .end = std::min(numel, begin + step), .arrays = {}});
  }
}

}  // namespace zero
