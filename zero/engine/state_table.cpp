#include "zero/engine/state_table.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "zero/base/error.h"
#include "zero/device/memory.h"
#include "zero/engine/flat.h"
#include "zero/engine/work_memory.h"
#include "zero/optim/optimizer.h"
#include "zero/optim/state_format.h"

namespace zero {

using partition::intersect;
using partition::Range;
using store::DiskTier;

namespace {

std::byte* at_byte(const at::Tensor& tensor, int64_t element) {
  return static_cast<std::byte*>(tensor.data_ptr()) + element * tensor.element_size();
}

uint16_t* halves_of(const at::Tensor& tensor) { return static_cast<uint16_t*>(tensor.data_ptr()); }

Category buffers_at(Tier tier) {
  return tier == Tier::host ? Category::host_buffers : Category::offload_buffers;
}

}  // namespace

std::vector<DiskTier::Unit> StateTable::units_on_disk(const std::vector<UnitPlan>& plans,
                                                      bool keeps_old_parameters,
                                                      bool keeps_old_states) {
  std::vector<DiskTier::Unit> units;
  for (const auto& plan : plans) {
    DiskTier::Unit unit{.numel = plan.owned.size(), .arrays = {}, .updated = plan.trainable};
    const bool doubled = plan.trainable && keeps_old_parameters;
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
        array.doubled = keeps_old_states;
      }
      unit.arrays.push_back(array);
    }
    units.push_back(std::move(unit));
  }
  return units;
}

StateTable::StateTable(const partition::Layout& layout, std::vector<UnitPlan> plans,
                       const Placement& placement, DeviceCopier& copier,
                       std::unique_ptr<DiskTier> disk, Options options)
    : layout_(layout),
      plans_(std::move(plans)),
      labels_(unit_labels(layout)),
      group_(*placement.shards),
      ledger_(group_.ledger()),
      copier_(copier),
      keeps_old_parameters_(options.keeps_old_parameters),
      keeps_old_states_(options.keeps_old_states),
      device_(
          std::make_unique<store::MemoryTier>(Tier::device, copier, layout.unit_count(), kStates)),
      host_(std::make_unique<store::MemoryTier>(Tier::host, copier, layout.unit_count(), kStates)),
      disk_(std::move(disk)),
      updated_(plans_.size(), 0) {
  for (const auto& plan : plans_) new_parameters_.push_back(new_parameters(plan));
  make_parameters(placement, options);
  for (int64_t u = 0; u < layout_.unit_count(); ++u) make_optimizer(u);
  make_staging();
}

StateTable::~StateTable() {
  try {
    wait_for_copies();
  } catch (const std::exception&) {  // the device has failed, which others report
  }
}

at::Tensor StateTable::zeros(Tier tier, int64_t numel, at::ScalarType dtype, Category category,
                             int64_t colour) const {
  ensure(tier != Tier::disk, "a disk has no arrays in memory");
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
    if (placement.host != nullptr) {
      kept_.push_back(
          group_.empty(slice * placement.same_place->size(), plan.dtype, Category::parameters)
              .zero_());
    }
    // A host keeps a quantised unit with the values of its messages.
    const bool rounded = group_.topology().hosts > 1 && plan.parameter_link.quantised();
    if (window_ && !rounded) {
      owned = window_->memory()
                  .narrow(0, window_offset(u), unit.bytes())
                  .view(plan.dtype)
                  .narrow(0, slice * group_.rank(), slice);
    } else if (placement.host != nullptr && !rounded) {
      owned = kept_.back().narrow(0, slice * placement.same_place->rank(), slice);
    } else if (plan.parameters_at == Tier::host) {
      owned = zeros(Tier::host, slice, plan.dtype, Category::host_parameters);
    } else if (sharded.parameters) {
      owned = group_.empty(slice, plan.dtype, Category::parameters).zero_();
    } else {
      // Peers gather into the array, so it lies where they can read it.
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
  if (auto& made = new_parameters_[static_cast<size_t>(unit)];
      made.place == NewParameters::Place::apart) {
    made.memory = zeros(plan.updated_at(), numel, plan.dtype, buffers_at(plan.updated_at()));
  }
  if (plan.optimizer_at == Tier::disk) return;
  const auto category =
      plan.optimizer_at == Tier::host ? Category::host_optimizer : Category::optimizer;
  // Parameters and gradients have colour 0.
  const auto last = static_cast<int64_t>(plan.moments.size()) + 1;
  for (const auto state : plan.optimizer_columns()) {
    const int64_t colour =
        state == State::master
            ? last
            : static_cast<int64_t>(column(state) - column(State::first_moment)) + 1;
    memory(unit, state) = zeros(plan.optimizer_at, plan.entries(state, numel), plan.dtype_of(state),
                                category, colour);
  }
}

StateTable::NewParameters StateTable::new_parameters(const UnitPlan& plan) const {
  using Kind = NewParameters::Kind;
  using Place = NewParameters::Place;
  if (!plan.trainable) return {};
  const bool crosses = plan.crosses() && !keeps_old_parameters_;
  // Master weights that came from a disk are gone after the update.
  const bool masters_serve = plan.copies_master() && !plan.copies_from_disk();
  return {.kind = !plan.own_master()     ? Kind::masters
                  : plan.copies_master() ? Kind::copies
                                         : Kind::rounded,
          .place = plan.parameters_at == Tier::disk ? Place::disk_block
                   : masters_serve                  ? Place::master
                   : keeps_old_parameters_          ? Place::apart
                   : crosses                        ? Place::staged_block
                                                    : Place::cell,
          .crosses = crosses};
}

void StateTable::make_staging() {
  int64_t bytes = 0;
  auto made_at = Tier::device;
  for (size_t u = 0; u < plans_.size(); ++u) {
    if (new_parameters_[u].place != NewParameters::Place::staged_block) continue;
    const auto& plan = plans_[u];
    made_at = plan.updated_at();
    bytes = std::max(bytes, std::min(plan.owned.size(), kPieceNumel) *
                                static_cast<int64_t>(c10::elementSize(plan.dtype)));
  }
  if (bytes == 0) return;
  const bool beside = is_asynchronous(device()) && made_at == Tier::host;
  staging_.resize(beside ? kParameterPieces : 1);
  for (auto& staging : staging_)
    staging.memory = zeros(made_at, bytes, at::kByte, buffers_at(made_at));
}

// Observers.

void StateTable::observe(std::shared_ptr<TableObserver> observer) {
  const std::lock_guard lock(observer_mutex_);
  observer_ = std::move(observer);
}

void StateTable::before_change(int64_t unit) const {
  std::shared_ptr<TableObserver> observer;
  {
    const std::lock_guard lock(observer_mutex_);
    observer = observer_;
  }
  if (observer) observer->before_change(unit);
}

// Cells.

State StateTable::held_as(int64_t unit, State state) const {
  return state == State::master && !plan(unit).own_master() ? State::parameters : state;
}

store::MemoryTier& StateTable::memory_tier(Tier tier) const {
  ensure(tier != Tier::disk, "a cell on a disk has no memory");
  return tier == Tier::host ? *host_ : *device_;
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

Range StateTable::entries(int64_t unit, State state, Range elements) const {
  const auto& plan = this->plan(unit);
  return {plan.entries(state, elements.begin), plan.entries(state, elements.end)};
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

optim::Sign StateTable::sign_of(int64_t unit, State state) const {
  return plan(unit).moment_signs[column(state) - column(State::first_moment)];
}

namespace {

// Returns the range of whole 8-bit blocks that `elements` lie in.
Range whole_blocks(Range elements) {
  const int64_t size = optim::kCodedBlock;
  return {elements.begin / size * size, at::round_up(elements.end, size)};
}

}  // namespace

at::Tensor StateTable::read_stored(int64_t unit, State state, Range elements) const {
  const auto held = held_as(unit, state);
  ensure(!plan(unit).is_coded(held) || elements == whole_blocks(elements),
         "8-bit states are read by whole blocks");
  if (plan(unit).tier(held) == Tier::host) wait_for_copies();
  return tier(unit, held).read(unit, number(unit, held), entries(unit, held, elements));
}

at::Tensor StateTable::read(int64_t unit, State state, Range elements) const {
  if (plan(unit).is_coded(state)) {
    const auto blocks = whole_blocks(elements);
    const auto codes = read_stored(unit, state, blocks).cpu();
    auto wide = at::empty({blocks.size()}, at::kFloat);
    optim::decode(static_cast<const std::byte*>(codes.const_data_ptr()),
                  wide.mutable_data_ptr<float>(), wide.numel(), sign_of(unit, state));
    return wide.narrow(0, elements.begin - blocks.begin, elements.size());
  }
  auto stored = read_stored(unit, state, elements);
  if (state != State::master || !plan(unit).split) return stored;
  return joined(tier(unit, State::parameters).read(unit, number(unit, State::parameters), elements),
                stored);
}

// The host joins and splits halves that lie on a device, as it decodes and encodes 8-bit states:
// nobody does so in a step.
at::Tensor StateTable::joined(const at::Tensor& upper, const at::Tensor& lower) const {
  auto whole = at::empty({upper.numel()}, at::kFloat);
  optim::join(halves_of(upper.cpu()), halves_of(lower.cpu()), whole.mutable_data_ptr<float>(),
              whole.numel());
  return whole.to(upper.device());
}

at::Tensor StateTable::read_new(int64_t unit, State state, Range elements) const {
  const auto& plan = this->plan(unit);
  const bool halves = state == State::master && plan.split;
  const bool elsewhere = held_as(unit, state) != State::parameters && !halves;
  const bool in_force = !keeps_old_parameters_ || updated_[static_cast<size_t>(unit)] == 0;
  if (in_force || elsewhere) return read(unit, state, elements);
  at::Tensor made;
  if (const auto place = place_on_disk(unit, State::parameters)) {
    made = disk_->read_behind(unit, *place, entries(unit, State::parameters, elements));
  } else {
    const auto& apart = new_parameters_[static_cast<size_t>(unit)].memory;
    const auto& from = apart.defined() ? apart : memory(unit, State::master);
    made = from.narrow(0, elements.begin, elements.size());
  }
  return halves ? joined(made, read_stored(unit, State::master, elements)) : made;
}

at::Tensor StateTable::full(int64_t unit, const at::Tensor& owned) const {
  const int64_t numel = layout_.unit(unit).numel;
  auto slice = owned.to(device());
  if (owned.numel() == numel) return slice;
  auto whole = at::empty({numel}, slice.options());
  group_.all_gather(whole, slice, label(unit)).wait();
  return whole;
}

void StateTable::write(int64_t unit, State state, Range elements, const at::Tensor& values) {
  if (elements.empty()) return;
  if (state == State::master && plan(unit).split) {
    write_halves(unit, elements, values);
  } else if (plan(unit).is_coded(state) && values.scalar_type() != at::kByte) {
    write_codes(unit, state, elements, values);
  } else {
    write_stored(unit, state, elements, values);
    if (held_as(unit, state) == State::parameters) reset_new_parameters(unit, elements);
  }
}

void StateTable::write_stored(int64_t unit, State state, Range elements, const at::Tensor& values) {
  before_change(unit);
  const auto held = held_as(unit, state);
  auto& at = tier(unit, held);
  at.write(unit, number(unit, held), entries(unit, held, elements), values, at.tier());
}

StateTable::Halves StateTable::split(int64_t unit, const at::Tensor& values) const {
  const auto whole = values.to(at::kFloat).contiguous().cpu();
  const auto half = [&](State state) {
    return at::empty({whole.numel()}, plan(unit).dtype_of(state));
  };
  Halves halves{half(State::parameters), half(State::master)};
  optim::split(whole.const_data_ptr<float>(), halves_of(halves.upper), halves_of(halves.lower),
               whole.numel());
  return halves;
}

void StateTable::write_halves(int64_t unit, Range elements, const at::Tensor& values) {
  const auto [upper, lower] = split(unit, values);
  write_stored(unit, State::master, elements, lower);
  write_stored(unit, State::parameters, elements, upper);
  reset_new_parameters(unit, elements);
}

void StateTable::write_new(int64_t unit, State state, Range elements, const at::Tensor& values) {
  if (elements.empty()) return;
  if (state == State::master && plan(unit).split) {
    const auto [upper, lower] = split(unit, values);
    write_stored(unit, State::master, elements, lower);
    write_beside(unit, elements, upper);
  } else if (held_as(unit, state) == State::parameters) {
    write_beside(unit, elements, values);
  } else {
    write(unit, state, elements, values);
  }
}

// Writes new parameters. Master weights that serve as such have the values already.
void StateTable::write_beside(int64_t unit, Range elements, const at::Tensor& values) {
  ensure(keeps_old_parameters_, "there are two copies of the parameters");
  before_change(unit);
  if (const auto place = place_on_disk(unit, State::parameters)) {
    disk_->write_behind(unit, *place, entries(unit, State::parameters, elements), values);
    return;
  }
  const auto& apart = new_parameters_[static_cast<size_t>(unit)].memory;
  if (apart.defined()) apart.narrow(0, elements.begin, elements.size()).copy_(values);
}

// Encodes whole blocks; elements of the blocks outside the range keep their values.
void StateTable::write_codes(int64_t unit, State state, Range elements, const at::Tensor& values) {
  const auto blocks = whole_blocks(elements);
  auto wide = values.to(at::kFloat).contiguous().cpu();
  if (blocks != elements) {
    const auto all = read(unit, state, blocks);
    all.narrow(0, elements.begin - blocks.begin, elements.size()).copy_(wide);
    wide = all;
  }
  const auto codes = at::zeros({plan(unit).entries(state, wide.numel())}, at::kByte);
  optim::encode(wide.const_data_ptr<float>(), static_cast<std::byte*>(codes.data_ptr()),
                wide.numel(), sign_of(unit, state));
  write_stored(unit, state, blocks, codes);
}

int64_t StateTable::transfer_bytes(int64_t unit, State state) const {
  const auto place = place_on_disk(unit, state);
  return place ? disk_->whole_bytes(unit, *place) : 0;
}

// Returns the number of the array of a cell that is on a disk.
int64_t StateTable::array_on_disk(int64_t unit, State state) const {
  const auto place = place_on_disk(unit, state);
  ensure(place.has_value(), "a cell that is transferred, or has two copies, is on a disk");
  return place.value();
}

store::Transfer StateTable::start_read(int64_t unit, State state, void* to) {
  return disk_->start_read(unit, array_on_disk(unit, state), to);
}

store::Transfer StateTable::start_write(int64_t unit, State state, const void* from) {
  return disk_->start_write(unit, array_on_disk(unit, state), from);
}

void StateTable::wait(store::Transfer& transfer) {
  if (disk_) disk_->wait(transfer);
}

void StateTable::exchange_copies(int64_t unit, State state) {
  disk_->flip(unit, array_on_disk(unit, state));
}

// Parameters.

Range StateTable::owned_part(int64_t parameter) const {
  return intersect(layout_.segment_of(parameter).range(), plan(layout_.unit_of(parameter)).owned);
}

namespace {

// Returns `part` of a unit, counted from the first element that `plan`'s rank owns.
Range from_first_owned(Range part, const UnitPlan& plan) {
  return {part.begin - plan.owned.begin, part.end - plan.owned.begin};
}

}  // namespace

void StateTable::write_parameter(int64_t parameter, const at::Tensor& values,
                                 std::optional<Tier> from) {
  const int64_t u = layout_.unit_of(parameter);
  const auto mine = owned_part(parameter);
  if (mine.empty()) return;
  before_change(u);
  const auto part =
      values.narrow(0, mine.begin - layout_.segment_of(parameter).offset, mine.size());
  auto& at = tier(u, State::parameters);
  at.write(u, number(u, State::parameters), from_first_owned(mine, plan(u)), part,
           from.value_or(at.tier()));
}

void StateTable::write_parameter(int64_t parameter, const at::Tensor& values) {
  write_parameter(parameter, values, std::nullopt);
}

void StateTable::write_from_device(int64_t parameter, const at::Tensor& values) {
  write_parameter(parameter, values, Tier::device);
}

at::Tensor StateTable::narrowed(int64_t unit, const at::Tensor& parameter) const {
  auto made = parameter.detach().to(plan(unit).dtype);
  if (plan(unit).split) {
    const auto values = flat_view(parameter).cpu();
    const auto upper = flat_view(made).cpu();
    optim::split(values.const_data_ptr<float>(), halves_of(upper), nullptr, values.numel());
    if (!made.is_cpu()) flat_view(made).copy_(upper);
  }
  return made;
}

void StateTable::write_owned(int64_t parameter, State state, const at::Tensor& values) {
  const int64_t u = layout_.unit_of(parameter);
  const auto mine = owned_part(parameter);
  if (mine.empty()) return;
  write(u, state, from_first_owned(mine, plan(u)),
        values.narrow(0, mine.begin - layout_.segment_of(parameter).offset, mine.size()));
}

void StateTable::reset_new_parameters(int64_t unit, Range elements) {
  const auto& plan = this->plan(unit);
  const auto& fresh = new_parameters_[static_cast<size_t>(unit)].memory;
  if (!fresh.defined() || (plan.own_master() && !plan.split)) return;
  copier_.copy(at_byte(fresh, elements.begin), plan.updated_at(),
               at_byte(memory(unit, State::parameters), elements.begin), plan.parameters_at,
               elements.size() * fresh.element_size());
}

void StateTable::refresh_master(int64_t parameter) {
  const int64_t u = layout_.unit_of(parameter);
  const auto& plan = this->plan(u);
  const auto part = owned_part(parameter);
  if (part.empty()) return;
  const auto mine = from_first_owned(part, plan);
  reset_new_parameters(u, mine);
  if (!plan.own_master()) return;
  auto written = read(u, State::parameters, mine);
  if (plan.split) {
    const auto lower = read_stored(u, State::master, mine).cpu();
    optim::fit_lower(halves_of(written.cpu()), halves_of(lower), mine.size());
    write_stored(u, State::master, mine, lower);
    return;
  }
  if (plan.crosses()) {
    const auto to = plan.updated_at();
    const auto here = at::empty_like(written, written.options().device(device_of(to)));
    copier_.copy(here, to, written, plan.parameters_at);
    written = here;
  }
  const auto master = read(u, State::master, mine);
  write_stored(
      u, State::master, mine,
      at::where(master.to(written.scalar_type()) == written, master, written.to(at::kFloat)));
}

void StateTable::use_new_parameters(int64_t unit) {
  auto& updated = updated_[static_cast<size_t>(unit)];
  if (updated == 0) return;
  if (keeps_old_parameters_) before_change(unit);  // a save may still read the new ones
  updated = 0;
  if (!keeps_old_parameters_) return;
  const auto& plan = this->plan(unit);
  if (keeps_old_states_ && plan.optimizer_at == Tier::disk) {
    disk_->wait_written(unit);
    for (const auto state : plan.optimizer_columns()) exchange_copies(unit, state);
  }
  if (plan.parameters_at == Tier::disk) {
    disk_->wait_written(unit);
    exchange_copies(unit, State::parameters);
    return;
  }
  const auto& fresh = new_parameters_[static_cast<size_t>(unit)].memory;
  const auto& from = fresh.defined() ? fresh : memory(unit, State::master);
  copier_.copy(memory(unit, State::parameters).data_ptr(), plan.parameters_at,
               from.const_data_ptr(), plan.updated_at(), static_cast<int64_t>(from.nbytes()),
               &parameter_copies_);
}

void StateTable::take_back_update(int64_t unit) {
  if (std::exchange(updated_[static_cast<size_t>(unit)], uint8_t{0}) == 0) return;
  ensure(keeps_old_states_, "the states before an update are kept");
  if (disk_) disk_->wait_written(unit);
  reset_new_parameters(unit);
}

void StateTable::drop_new_parameters() { std::fill(updated_.begin(), updated_.end(), uint8_t{0}); }

// Updates.

void StateTable::run_updates_beside(std::function<std::optional<int64_t>(int64_t index)> upcoming) {
  if (disk_) disk_->run_beside(std::move(upcoming));
}

void StateTable::wait_for_written_states() {
  if (disk_) disk_->settle();
}

void StateTable::end_updates() {
  if (disk_) disk_->end_step();
}

DiskUse StateTable::disk_use() const {
  if (!disk_) return {};
  const auto counts = disk_->file().counts();
  return {disk_->bytes(), counts.read, counts.written, disk_->wait_ms()};
}

// Blocks.

// Returns the addresses of a part of a row, except those of parameters in memory.
StateTable::Block StateTable::cells(int64_t unit, const at::Tensor& gradient,
                                    const DiskTier::Block& part) const {
  const auto& plan = this->plan(unit);
  Block block{.begin = part.begin, .end = part.end};
  const auto on_disk = plan.columns_on_disk();
  for (size_t i = 0; i < part.arrays.size(); ++i) block.at[column(on_disk[i])] = part.arrays[i];
  if (gradient.defined()) block.at[column(State::gradients)] = at_byte(gradient, block.begin);
  if (plan.optimizer_at == Tier::disk) return block;
  for (const auto state : plan.optimizer_columns())
    block.at[column(state)] =
        static_cast<std::byte*>(memory(unit, state).data_ptr()) + plan.bytes_of(state, block.begin);
  return block;
}

void StateTable::for_each_block(int64_t unit, const at::Tensor& gradient,
                                const std::function<void(const Block&)>& update, Weights weights) {
  using Kind = NewParameters::Kind;
  using Place = NewParameters::Place;
  before_change(unit);
  const auto& plan = this->plan(unit);
  const auto& made = new_parameters_[static_cast<size_t>(unit)];
  const bool staged = made.place == Place::staged_block;
  const bool updated = weights == Weights::updated;
  if (updated) updated_[static_cast<size_t>(unit)] = 1;

  const auto sweep = [&](const DiskTier::Block& part) {
    auto block = cells(unit, gradient, part);
    const int64_t bytes =
        (block.end - block.begin) * static_cast<int64_t>(c10::elementSize(plan.dtype));
    const auto old = [&] { return at_byte(memory(unit, State::parameters), block.begin); };
    auto& parameters = block.at[column(State::parameters)];
    auto& master = block.at[column(State::master)];
    auto* staging = staged ? &staging_[staged_++ % staging_.size()] : nullptr;
    // A block on the device is written on the stream, after the copies that read it.
    if (staged && plan.updated_at() == Tier::host) staging->sent.wait_on_host();
    if (staged) parameters = static_cast<std::byte*>(staging->memory.data_ptr());
    if (made.place == Place::apart) parameters = at_byte(made.memory, block.begin);
    if (made.place == Place::cell) parameters = old();
    if (made.kind == Kind::masters) {
      master = parameters;
      if (staged)
        copier_.copy(parameters, plan.updated_at(), old(), plan.parameters_at, bytes,
                     &staging->sent);
    }
    auto* const place = parameters;
    if (made.kind != Kind::rounded) parameters = nullptr;
    block.fresh = made.kind == Kind::rounded && !plan.split &&
                  (made.place == Place::disk_block || (updated && made.place != Place::cell));
    update(block);
    if (!updated) return;
    if (made.kind == Kind::copies && made.place != Place::master)
      std::memcpy(place, master, static_cast<size_t>(bytes));
    if (!made.crosses) return;
    copier_.copy(old(), plan.parameters_at, staged ? place : master, plan.updated_at(), bytes,
                 &parameter_copies_);
    if (staged) staging->sent.record(device());
  };
  // SGD without momentum on fp32 parameters in memory has no states on disk.
  if (!plan.columns_on_disk().empty()) {
    disk_->for_each_block(unit, sweep, !staged);
    return;
  }
  const int64_t numel = plan.owned.size();
  const int64_t step = made.crosses ? kPieceNumel : numel;
  for (int64_t begin = 0; begin < numel; begin += step)
    sweep({.begin = begin, .end = std::min(numel, begin + step), .arrays = {}});
}

}  // namespace zero
