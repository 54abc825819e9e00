#include "zero/engine/state_table.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "zero/base/error.h"
#include "zero/device/memory.h"
#include "zero/engine/flat.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/state_format.h"

namespace zero {

using partition::intersect;
using partition::Range;
using store::DiskTier;

namespace {

// Elements of a block that crosses between device and host: it stays in a core's cache.
constexpr int64_t kStagedNumel = 1 << 18;
// Of such blocks, where the copies go on beside the update.
constexpr size_t kStagedAtOnce = 4;

std::byte* at_byte(const at::Tensor& tensor, int64_t element) {
  return static_cast<std::byte*>(tensor.data_ptr()) + element * tensor.element_size();
}

uint16_t* halves_of(const at::Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }

Category buffers_at(Tier tier) {
  return tier == Tier::host ? Category::host_buffers : Category::offload_buffers;
}

}  // namespace

std::vector<DiskTier::Unit> StateTable::units_on_disk(const std::vector<UnitPlan>& plans,
                                                      bool hides, bool undoes) {
  std::vector<DiskTier::Unit> units;
  for (const auto& plan : plans) {
    DiskTier::Unit unit{.numel = plan.owned.size(), .arrays = {}, .updated = plan.trainable};
    const bool doubled = plan.trainable && hides;
    for (const auto state : plan.columns_on_disk()) {
      DiskTier::Array array{.dtype = plan.dtype_of(state),
                            .entries = plan.entries(state, DiskTier::kEntryBlock)};
      if (state == State::parameters) {
        array.read = !plan.own_master() || plan.split;
        array.doubled = doubled;
      } else if (state == State::gradients) {
        array.write = false;
        array.doubled = doubled;
      } else {
        array.doubled = undoes;
      }
      unit.arrays.push_back(array);
    }
    units.push_back(std::move(unit));
  }
  return units;
}

StateTable::StateTable(const partition::Layout& layout, std::vector<UnitPlan> plans,
                       const Placement& placement, HostLink& link, std::unique_ptr<DiskTier> disk,
                       Options options)
    : layout_(layout),
      plans_(std::move(plans)),
      group_(*placement.shards),
      ledger_(group_.ledger()),
      link_(link),
      hides_(options.hides),
      undoes_(options.undoes),
      device_(
          std::make_unique<store::MemoryTier>(Tier::device, link, layout.unit_count(), kStates)),
      host_(std::make_unique<store::MemoryTier>(Tier::host, link, layout.unit_count(), kStates)),
      disk_(std::move(disk)),
      hidden_(plans_.size()),
      unshown_(plans_.size(), 0) {
  make_parameters(placement, options);
  for (int64_t u = 0; u < layout_.unit_count(); ++u) make_optimizer(u);
  make_staging();
}

StateTable::~StateTable() {
  try {
    settle();
  } catch (const std::exception&) {  // the device has failed, and said so elsewhere
  }
}

at::Tensor StateTable::zeros(Tier tier, int64_t numel, at::ScalarType dtype, Category category,
                             int64_t colour) const {
  return (tier == Tier::host ? pinned_zeros : device_zeros)(numel, dtype, device(), ledger_,
                                                            category, colour);
}

void StateTable::make_parameters(const Placement& placement, const Options& options) {
  const auto& sharded = placement.sharded;
  int64_t bytes = 0;
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    window_offset_.push_back(bytes);
    bytes += layout_.unit(u).bytes();
  }
  // Slices that are elsewhere have no place in a window.
  const bool all_here = std::all_of(plans_.begin(), plans_.end(), [](const UnitPlan& plan) {
    return plan.parameters_at == Tier::device;
  });
  if (sharded.parameters && options.in_place && all_here)
    window_ = group_.window(bytes, layout_.unit_count(), Category::parameters);
  for (int64_t u = 0; u < layout_.unit_count(); ++u) {
    const auto& unit = layout_.unit(u);
    const auto& plan = this->plan(u);
    if (plan.parameters_at == Tier::disk) continue;
    auto& owned = memory(u, State::parameters);
    const int64_t slice = layout_.slice_numel(u);
    if (window_ && !(options.apart && options.apart(u))) {
      owned = window_->memory()
                  .narrow(0, window_offset(u), unit.bytes())
                  .view(plan.dtype)
                  .narrow(0, slice * group_.rank(), slice);
    } else if (plan.parameters_at == Tier::host) {
      owned = zeros(Tier::host, slice, plan.dtype, Category::host_parameters);
    } else if (sharded.parameters) {
      owned = group_.empty(slice, plan.dtype, Category::parameters).zero_();
    } else {
      // Where the ranks gather into it, the array lies where the peers can read it.
      whole_.push_back(sharded.optimizer
                           ? group_.empty(unit.numel, plan.dtype, Category::parameters).zero_()
                           : zeros(Tier::device, unit.numel, plan.dtype, Category::parameters));
      owned = whole_.back().narrow(0, plan.owned.begin, plan.owned.size());
    }
  }
}

void StateTable::make_optimizer(int64_t unit) {
  const auto& plan = this->plan(unit);
  if (!plan.trainable) return;
  const int64_t numel = plan.owned.size();
  if (hides_ && plan.parameters_at != Tier::disk &&
      (!plan.copies_master() || plan.copies_from_disk())) {
    hidden_[static_cast<size_t>(unit)] =
        zeros(plan.updated_at(), numel, plan.dtype, buffers_at(plan.updated_at()));
  }
  if (plan.states_at == Tier::disk) return;
  const auto category =
      plan.states_at == Tier::host ? Category::host_optimizer : Category::optimizer;
  // Parameters and gradients have colour 0.
  const auto last = static_cast<int64_t>(plan.moments.size()) + 1;
  for (const auto state : plan.optimizer_columns()) {
    const int64_t colour =
        state == State::master
            ? last
            : static_cast<int64_t>(column(state) - column(State::first_moment)) + 1;
    memory(unit, state) =
        zeros(plan.states_at, plan.entries(state, numel), plan.dtype_of(state), category, colour);
  }
}

// Of the units whose new parameters leave the block in which they are made: master weights that are
// the parameters are copied from where they are kept, unless that is a disk.
bool StateTable::is_staged(const UnitPlan& plan) const {
  return plan.trainable && plan.crosses() && !hides_ &&
         (!plan.copies_master() || plan.copies_from_disk());
}

void StateTable::make_staging() {
  int64_t bytes = 0;
  auto made_at = Tier::device;
  for (const auto& plan : plans_) {
    if (!is_staged(plan)) continue;
    made_at = plan.updated_at();
    bytes = std::max(bytes, std::min(plan.owned.size(), kStagedNumel) *
                                static_cast<int64_t>(c10::elementSize(plan.dtype)));
  }
  if (bytes == 0) return;
  const bool beside = is_asynchronous(device()) && made_at == Tier::host;
  staging_.resize(beside ? kStagedAtOnce : 1);
  for (auto& staging : staging_)
    staging.memory = zeros(made_at, bytes, at::kByte, buffers_at(made_at));
}

// Cells.

State StateTable::held_as(int64_t unit, State state) const {
  return state == State::master && !plan(unit).own_master() ? State::parameters : state;
}

store::StateTier& StateTable::tier(int64_t unit, State state) const {
  const auto at = plan(unit).tier(state);
  if (at == Tier::disk) return *disk_;
  return memory_tier(at);
}

at::Tensor& StateTable::memory(int64_t unit, State state) const {
  const auto held = held_as(unit, state);
  return memory_tier(plan(unit).tier(held)).memory(unit, static_cast<int64_t>(held));
}

std::optional<int64_t> StateTable::place_on_disk(int64_t unit, State state) const {
  const auto columns = plan(unit).columns_on_disk();
  const auto* found = std::find(columns.begin(), columns.end(), held_as(unit, state));
  if (found == columns.end()) return std::nullopt;
  return found - columns.begin();
}

int64_t StateTable::number(int64_t unit, State state) const {
  return place_on_disk(unit, state).value_or(static_cast<int64_t>(held_as(unit, state)));
}

std::string_view StateTable::name(int64_t unit, State state) const {
  switch (state) {
    case State::parameters:
      return "parameter";
    case State::gradients:
      return "gradient";
    case State::master:
      return "master";
    default:
      return plan(unit).moments[column(state) - column(State::first_moment)];
  }
}

std::vector<std::string_view> StateTable::names(int64_t unit) const {
  if (!trainable(unit)) return {};
  std::vector<std::string_view> names{"master"};
  const auto& moments = plan(unit).moments;
  names.insert(names.end(), moments.begin(), moments.end());
  return names;
}

std::optional<State> StateTable::find(int64_t unit, std::string_view name) const {
  const auto known = names(unit);
  const auto found = std::find(known.begin(), known.end(), name);
  if (found == known.end()) return std::nullopt;
  return static_cast<State>(static_cast<int64_t>(State::master) + (found - known.begin()));
}

at::Tensor StateTable::read_kept(int64_t unit, State state) const {
  const auto held = held_as(unit, state);
  if (plan(unit).tier(held) == Tier::host) settle();
  return tier(unit, held).read(unit, number(unit, held));
}

optim::Sign StateTable::sign_of(int64_t unit, State state) const {
  return plan(unit).moment_signs[column(state) - column(State::first_moment)];
}

at::Tensor StateTable::read(int64_t unit, State state) const {
  auto values = read_kept(unit, state);
  if (plan(unit).is_coded(state)) {
    auto wide = at::empty({plan(unit).owned.size()}, at::kFloat);
    optim::decode(static_cast<const std::byte*>(values.const_data_ptr()),
                  wide.mutable_data_ptr<float>(), wide.numel(), sign_of(unit, state));
    return wide;
  }
  if (state != State::master || !plan(unit).split) return values;
  const auto upper = tier(unit, State::parameters).read(unit, number(unit, State::parameters));
  auto joined = at::empty({values.numel()}, at::kFloat);
  optim::join(halves_of(upper), halves_of(values), joined.mutable_data_ptr<float>(),
              joined.numel());
  return joined;
}

void StateTable::write(int64_t unit, State state, int64_t begin, const at::Tensor& values) {
  const auto held = held_as(unit, state);
  auto& at = tier(unit, held);
  at.write(unit, number(unit, held), begin, values, at.tier());
}

void StateTable::put_halves(int64_t unit, int64_t begin, const at::Tensor& values) {
  const int64_t numel = values.numel();
  const auto whole = values.to(at::kFloat).contiguous();
  const auto part = [&](State state) {
    return on_disk(unit, state) ? at::empty({numel}, plan(unit).dtype_of(state))
                                : memory(unit, state).narrow(0, begin, numel);
  };
  const auto upper = part(State::parameters);
  const auto lower = part(State::master);
  optim::split(whole.const_data_ptr<float>(), halves_of(upper), halves_of(lower), numel);
  if (on_disk(unit, State::master)) write(unit, State::master, begin, lower);
  if (on_disk(unit, State::parameters)) write(unit, State::parameters, begin, upper);
  follow(unit, begin, numel);
}

void StateTable::put(int64_t unit, State state, const at::Tensor& values) {
  if (plan(unit).is_coded(state)) {
    replace(unit, state, values);
  } else if (state == State::master && plan(unit).split) {
    put_halves(unit, 0, values);
  } else if (on_disk(unit, held_as(unit, state))) {
    write(unit, state, 0, values);
  }
}

void StateTable::replace(int64_t unit, State state, const at::Tensor& values) {
  if (state == State::master && plan(unit).split) {
    put_halves(unit, 0, values);
    return;
  }
  const auto& plan = this->plan(unit);
  if (plan.is_coded(state) && values.scalar_type() != at::kByte) {
    const auto wide = values.to(at::kFloat).contiguous();
    const auto codes = at::zeros({plan.entries(state, wide.numel())}, at::kByte);
    optim::encode(wide.const_data_ptr<float>(), static_cast<std::byte*>(codes.data_ptr()),
                  wide.numel(), sign_of(unit, state));
    write(unit, state, 0, codes);
    return;
  }
  write(unit, state, 0, values);
  if (held_as(unit, state) == State::parameters) follow(unit);
}

// Parameters.

Range StateTable::owned_part(int64_t parameter) const {
  return intersect(layout_.segment_of(parameter).range(), plan(layout_.unit_of(parameter)).owned);
}

void StateTable::write_parameter(int64_t parameter, const at::Tensor& values, Tier from) {
  const int64_t u = layout_.unit_of(parameter);
  const auto mine = owned_part(parameter);
  if (mine.empty()) return;
  const auto part =
      values.narrow(0, mine.begin - layout_.segment_of(parameter).offset, mine.size());
  tier(u, State::parameters)
      .write(u, number(u, State::parameters), mine.begin - plan(u).owned.begin, part, from);
}

at::Tensor StateTable::narrowed(int64_t unit, const at::Tensor& parameter) const {
  auto made = parameter.detach().to(plan(unit).dtype);
  if (plan(unit).split) {
    const auto values = flat_view(parameter);
    optim::split(values.const_data_ptr<float>(), halves_of(flat_view(made)), nullptr,
                 values.numel());
  }
  return made;
}

void StateTable::set_master(int64_t parameter, const at::Tensor& values) {
  const int64_t u = layout_.unit_of(parameter);
  const auto mine = owned_part(parameter);
  if (mine.empty()) return;
  const auto part =
      values.narrow(0, mine.begin - layout_.segment_of(parameter).offset, mine.size());
  const int64_t begin = mine.begin - plan(u).owned.begin;
  if (plan(u).split) {
    put_halves(u, begin, part);
    return;
  }
  write(u, State::master, begin, part);
  if (!on_disk(u, held_as(u, State::master))) follow(u, begin, mine.size());
}

void StateTable::follow(int64_t unit, int64_t begin, int64_t numel) {
  const auto& plan = this->plan(unit);
  const auto& hidden = hidden_[static_cast<size_t>(unit)];
  if (!hidden.defined() || (plan.own_master() && !plan.split)) return;
  link_.copy(at_byte(hidden, begin), plan.updated_at(),
             at_byte(memory(unit, State::parameters), begin), plan.parameters_at,
             numel * hidden.element_size());
}

void StateTable::follow(int64_t unit) { follow(unit, 0, plan(unit).owned.size()); }

void StateTable::refresh_master(int64_t parameter) {
  const int64_t u = layout_.unit_of(parameter);
  const auto& plan = this->plan(u);
  const auto mine = owned_part(parameter);
  if (mine.empty()) return;
  const int64_t begin = mine.begin - plan.owned.begin;
  follow(u, begin, mine.size());
  if (!plan.own_master()) return;
  auto written = read(u, State::parameters).narrow(0, begin, mine.size());
  if (plan.split) {
    const auto lower =
        tier(u, State::master).read(u, number(u, State::master)).narrow(0, begin, mine.size());
    optim::fit_lower(halves_of(written), halves_of(lower), mine.size());
    if (on_disk(u, State::master)) write(u, State::master, begin, lower);
    return;
  }
  if (plan.crosses()) {
    const auto to = plan.updated_at();
    const auto here = at::empty_like(written, written.options().device(device_of(to)));
    link_.copy(here, to, written, plan.parameters_at);
    written = here;
  }
  const auto whole = read(u, State::master);
  auto master = whole.narrow(0, begin, mine.size());
  master.copy_(
      at::where(master.to(written.scalar_type()) == written, master, written.to(at::kFloat)));
  put(u, State::master, whole);
}

void StateTable::show(int64_t unit) {
  if (std::exchange(unshown_[static_cast<size_t>(unit)], uint8_t{0}) == 0 || !hides_) return;
  const auto& plan = this->plan(unit);
  if (undoes_ && plan.states_at == Tier::disk) {
    disk_->wait_written(unit);
    for (const auto state : plan.optimizer_columns())
      disk_->flip(unit, place_on_disk(unit, state).value());
  }
  if (plan.parameters_at == Tier::disk) {
    disk_->wait_written(unit);
    disk_->flip(unit, place_on_disk(unit, State::parameters).value());
    return;
  }
  const auto& hidden = hidden_[static_cast<size_t>(unit)];
  const auto& updated = hidden.defined() ? hidden : memory(unit, State::master);
  link_.copy(memory(unit, State::parameters).data_ptr(), plan.parameters_at,
             updated.const_data_ptr(), plan.updated_at(), static_cast<int64_t>(updated.nbytes()),
             &shown_);
}

void StateTable::undo(int64_t unit) {
  if (std::exchange(unshown_[static_cast<size_t>(unit)], uint8_t{0}) == 0) return;
  ensure(undoes_, "the states before an update are kept");
  if (disk_ != nullptr) disk_->wait_written(unit);
  follow(unit);
}

void StateTable::forget_hidden() { std::fill(unshown_.begin(), unshown_.end(), uint8_t{0}); }

// Blocks.

void StateTable::for_each_block(int64_t unit, const at::Tensor& gradient,
                                const std::function<void(const Block&)>& update, Weights weights) {
  const auto& plan = this->plan(unit);
  const auto on_disk = plan.columns_on_disk();
  const auto optimizer = plan.optimizer_columns();
  const auto& hidden = hidden_[static_cast<size_t>(unit)];
  const bool narrows = plan.own_master() && !plan.copies_master();
  // The new parameters leave the block in which they were made for the other memory.
  const bool crosses = plan.crosses() && !hides_;
  const bool staged = is_staged(plan);
  const bool parameters_on_disk = plan.parameters_at == Tier::disk;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(plan.dtype));
  const bool updated = weights == Weights::updated;
  if (updated) unshown_[static_cast<size_t>(unit)] = 1;

  const auto pass = [&](const DiskTier::Block& from_disk) {
    Block block{.begin = from_disk.begin, .end = from_disk.end};
    const int64_t bytes = (block.end - block.begin) * element_bytes;
    for (size_t i = 0; i < on_disk.size() && i < from_disk.arrays.size(); ++i)
      block.at[column(on_disk[i])] = from_disk.arrays[i];
    auto& parameters = block.at[column(State::parameters)];
    auto* staging = staged ? &staging_[staged_++ % staging_.size()] : nullptr;
    // One on the device is written behind the copies that read it.
    if (staged && plan.updated_at() == Tier::host) staging->sent.wait_on_host();
    if (!parameters_on_disk) {
      parameters = staged             ? static_cast<std::byte*>(staging->memory.data_ptr())
                   : hidden.defined() ? at_byte(hidden, block.begin)
                                      : at_byte(memory(unit, State::parameters), block.begin);
    }
    if (gradient.defined()) block.at[column(State::gradients)] = at_byte(gradient, block.begin);
    if (plan.states_at != Tier::disk) {
      for (const auto state : optimizer)
        block.at[column(state)] = static_cast<std::byte*>(memory(unit, state).data_ptr()) +
                                  plan.bytes_of(state, block.begin);
    }
    auto& master = block.at[column(State::master)];
    if (!plan.own_master()) {
      master = parameters;
      if (staged) {
        link_.copy(parameters, plan.updated_at(),
                   at_byte(memory(unit, State::parameters), block.begin), plan.parameters_at, bytes,
                   &staging->sent);
      }
    }
    auto* const place = parameters;
    if (!narrows) parameters = nullptr;
    block.fresh =
        narrows && !plan.split && (parameters_on_disk || (updated && (hidden.defined() || staged)));
    update(block);
    if (!updated) return;
    if (plan.copies_from_disk()) std::memcpy(place, master, static_cast<size_t>(bytes));
    if (!crosses) return;
    link_.copy(at_byte(memory(unit, State::parameters), block.begin), plan.parameters_at,
               staged ? place : master, plan.updated_at(), bytes, &shown_);
    if (staged) staging->sent.record(device());
  };
  // SGD without momentum on fp32 parameters in memory has no states on disk.
  if (!on_disk.empty()) {
    disk_->for_each_block(unit, pass, !staged);
    return;
  }
  const int64_t numel = plan.owned.size();
  const int64_t step = crosses ? kStagedNumel : numel;
  for (int64_t begin = 0; begin < numel; begin += step)
    pass({.begin = begin, .end = std::min(numel, begin + step), .arrays = {}});
}

}  // namespace zero
