// The form of a unit's states: in which dtype each is stored, added up and sent, and whether it is
// whole, split, coded or packed. It is decided once, in the plan, from numbers alone; the flows and
// the costs read it. Two dtypes of arrays on their way are decided by `comm`, and repeated for the
// formulas:
//   - Between hosts of several ranks each the sum of a host's ranks crosses in fp32: SliceSums in
//     comm/hosts_sum.cpp does so, and `partial_wire` in partition/link_bytes.cpp counts it.
//   - A backend that is not libzero's may widen arrays: Group::reduce_scatter does so
//     (Group::sent_dtype in comm/group.h), and `form_of` repeats it from PlannedRanks.
//
// Note [Dtypes of gradients]
// A pass collects gradients in an array (`collected`). If sums over ranks have another dtype
// (`reduced`), the array is converted. Each rank sends its part of it (`sent_dtype`). If there are
// replicas, the sum over the ranks of a shard group arrives (`partial`), and these sums are added
// over the replicas. The sum over all ranks (`sum_dtype`) is stored, or added to that of earlier
// passes, in the dtype that the update reads.
//   - Division (prescaling) comes before rounding, so an array that is still to be divided is
//     collected as autograd made it.
//   - A sum that is added to that of an earlier pass of the step is not rounded before.
//   - A rank that is alone sends nothing, so `communication_data_type` does not round its sums. Its
//     array comes down to the tier in host memory as it is, since a wider dtype would hold no more.
//   - A backend that is not libzero's adds arrays of one dtype, so it sends the sum's dtype if that
//     is wider.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "zero/comm/link_wire.h"
#include "zero/config/config.h"
#include "zero/optim/state_format.h"
#include "zero/partition/formulas.h"
#include "zero/partition/link_bytes.h"
#include "zero/partition/rank_grid.h"
#include "zero/store/tier.h"

namespace zero {

/// A column of the table. The optimizer's states besides master weights (Adam's moments) are its
/// last columns, in the order of optim::state_names.
enum class State : uint8_t { parameters, gradients, master, first_moment, second_moment };
inline constexpr int64_t kStates = 5;

/// Returns the optimizer's state number `index`.
constexpr State moment(int64_t index) {
  constexpr std::array kMoments{State::first_moment, State::second_moment};
  return kMoments.at(static_cast<size_t>(index));
}
constexpr size_t column(State state) { return static_cast<size_t>(state); }

/// How an array crosses between hosts. Inside a host arrays are read as they are.
struct LinkForm {
  enum class Coding : uint8_t {
    raw,
    quantised,        ///< Note [Quantised messages] in comm/quantise_kernels.h
    packed_exponents  ///< with all bits: Note [Packed exponents] in comm/packed_exponents.h
  };
  Coding coding = Coding::raw;
  comm::Quantisation quantisation{};

  bool quantised() const { return coding == Coding::quantised; }
  /// Returns the wire of a collective: nothing if the array crosses as it is.
  std::optional<comm::LinkWire> wire() const;
  /// Returns the wire that the formulas count for an array of this dtype.
  partition::Wire counted(at::ScalarType dtype) const;
};

/// How the gradients of a unit are collected, sent and added up: Note [Dtypes of gradients].
struct GradientForm {
  at::ScalarType collected = at::kFloat;  ///< the array that a pass collects gradients in
  at::ScalarType reduced = at::kFloat;    ///< the array that is reduced
  at::ScalarType partial = at::kFloat;    ///< a shard group's sum on its way to the replicas
  /// Sums are rounded to `reduced`, which has fewer bits than the array that passes add up in.
  bool rounds = false;
  /// The sum over replicas is made once a step, after micro-batches have added up in the
  /// shard group.
  bool defers = false;
  LinkForm link;  ///< sums of a host on their way to the others

  /// Returns whether the array is converted before it is reduced.
  bool converts() const { return reduced != collected; }
  /// Returns whether a rank sends gradients of parameters of `dtype` with the bits that autograd
  /// made.
  bool sends_as_made(at::ScalarType dtype) const {
    return collected == dtype && !converts() && sent_dtype(true) == dtype &&
           sent_dtype(false) == dtype && link.coding == LinkForm::Coding::raw;
  }
  /// Return the bytes of an element of the arrays above, and of a slice on its way to its sum, in
  /// the widest dtype that each has.
  int64_t bucket_element_bytes() const { return widest_bytes(collected, reduced); }
  int64_t slice_element_bytes() const { return widest_bytes(reduced, sum_dtype(false)); }

  // `first` asks about the first pass of a step, and else about a later one.
  /// Returns the dtype of the sum over ranks, before it is added to that of earlier passes.
  at::ScalarType sum_dtype(bool first) const { return sums[first ? 0 : 1]; }
  /// Returns the dtype in which a rank sends the array to its shard group.
  at::ScalarType sent_dtype(bool first) const { return sent_in_shard_group[first ? 0 : 1]; }
  /// Returns the dtype in which a rank sends a shard group's sum to the replicas.
  at::ScalarType sent_on_dtype(bool first) const { return sent_to_replicas[first ? 0 : 1]; }

  std::array<at::ScalarType, 2> sums{at::kFloat, at::kFloat};
  std::array<at::ScalarType, 2> sent_in_shard_group{at::kFloat, at::kFloat};
  std::array<at::ScalarType, 2> sent_to_replicas{at::kFloat, at::kFloat};

 private:
  static int64_t widest_bytes(at::ScalarType a, at::ScalarType b) {
    return static_cast<int64_t>(std::max(c10::elementSize(a), c10::elementSize(b)));
  }
};

/// The form of each state of a unit.
struct Form {
  at::ScalarType dtype = at::kFloat;           ///< dtype of the parameters
  at::ScalarType gradient_dtype = at::kFloat;  ///< dtype of the sums that the update reads
  /// Master weights of bf16 parameters are stored as their lower halves only: Note [Split master
  /// weights] in zero/optim/halves.h. Parameters and states then lie in the same place, or the
  /// states on disk.
  bool split = false;
  /// bf16 parameters are their own master weights, rounded stochastically: zero/optim/narrow.h.
  bool narrow = false;
  /// The format of the optimizer's states besides master weights.
  optim::StateFormat moment_format = optim::StateFormat::fp32;
  LinkForm parameter_link;  ///< parameters between hosts
  GradientForm gradients;   ///< used if the unit is trained

  at::ScalarType master_dtype() const { return split ? at::kShort : narrow ? dtype : at::kFloat; }
  at::ScalarType moment_dtype() const;
  at::ScalarType dtype_of(State state) const;
  /// Returns whether a state is stored in blocks of 8-bit codes: Note [States in 8 bits] in
  /// optim/state_format.h.
  bool is_coded(State state) const {
    return state >= State::first_moment && moment_format == optim::StateFormat::eight_bit;
  }
  /// Returns the entries of a cell's array for `elements` elements, in its dtype; with codes, the
  /// bytes of their whole blocks.
  int64_t entries(State state, int64_t elements) const {
    return is_coded(state) ? optim::state_bytes(moment_format, elements) : elements;
  }
  int64_t bytes_of(State state, int64_t elements) const {
    return entries(state, elements) * static_cast<int64_t>(c10::elementSize(dtype_of(state)));
  }
};

/// The ranks that an engine is planned for, as one of them sees them.
struct PlannedRanks {
  partition::RankGrid grid{};
  int64_t rank = 0;
  /// The backends of a shard group, and of the replicas, send arrays in the dtype of the sum if
  /// that is wider (comm::Group::sent_dtype). libzero's own do not.
  bool widens_in_shard_group = false;
  bool widens_to_replicas = false;
};

/// The settings beside the configuration that the forms of all units depend on.
struct FormSettings {
  PlannedRanks ranks{};
  partition::Sharding sharded{};
  /// Updates run in backward: each sum is handed over as it is reduced.
  bool in_backward = false;
};

/// Returns the form of a unit whose parameters have dtype `dtype`, and whose reduced gradients go
/// to tier `gradients_at`.
Form form_of(const Config& config, const FormSettings& settings, at::ScalarType dtype,
             bool trainable, Tier gradients_at);

}  // namespace zero
