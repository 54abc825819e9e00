// The layout: the places of the parameters' bytes, as integers alone. Everything else in libzero
// uses it.
//
// Note [Units]
// Parameters are laid out in registration order into units: flat arrays of up to `unit_bytes` that
// never split a parameter (one that is larger is a unit of its own). A unit is homogeneous in
// `kind` (dtype, trainable or not, optimizer, number of its states): a parameter joins the open
// unit of its kind. Each parameter starts on a multiple of kAlignment elements, at every stage,
// because a matrix product's rounding can depend on the alignment of its operands. A unit is padded
// to a multiple of N x replicas x kAlignment elements and cut into N slices of equal length: rank r
// owns slice r of every unit. N is the number of shards here: all ranks, or those of a shard group
// (Note [Hybrid sharding] in engine/placement.h). Parameter, gradient, master and moment arrays of
// a unit share this layout, so the same integers serve all-gather, reduce-scatter, the optimizer
// and the checkpoint. Which parameters share a unit depends on neither N nor the stage; only the
// tail padding depends on N.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace zero::partition {

/// The alignment in elements: each parameter of a unit, and each slice, starts on a multiple of it.
inline constexpr int64_t kAlignment = 64;

/// A parameter as the layout sees it.
struct Parameter {
  std::string name;
  int64_t numel = 0;
  int64_t element_bytes = 4;
  int64_t kind = 0;  ///< only parameters of equal kind share a unit
};

/// A half-open range of elements.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return end <= begin; }
  bool operator==(const Range&) const = default;
};

/// Returns the elements that are in both ranges, or an empty range (begin == end) if there are
/// none.
Range intersect(Range a, Range b);

/// The place of a parameter in its unit.
struct Segment {
  int64_t parameter = 0;  ///< index into Layout::parameters()
  int64_t offset = 0;     ///< elements from the start of the unit
  int64_t numel = 0;
  Range range() const { return {offset, offset + numel}; }
};

struct Unit {
  int64_t kind = 0;
  int64_t element_bytes = 4;
  std::vector<Segment> segments;
  int64_t content = 0;  ///< elements of its parameters, without padding
  int64_t numel = 0;    ///< elements with padding: a multiple of N x replicas x kAlignment
  int64_t bytes() const { return numel * element_bytes; }
};

class Layout {
 public:
  /// Lays `parameters` out for `shards` ranks, which own a slice each; each slice can be divided
  /// among `replicas`. Throws ConfigError if unit_bytes or `shards` is not positive.
  Layout(std::vector<Parameter> parameters, int shards, int64_t unit_bytes, int replicas = 1);

  const std::vector<Parameter>& parameters() const { return parameters_; }
  const std::vector<Unit>& units() const { return units_; }
  const Unit& unit(int64_t index) const { return units_[static_cast<size_t>(index)]; }
  int64_t unit_count() const { return static_cast<int64_t>(units_.size()); }
  /// Returns the number of slices of each unit (N).
  int shards() const { return shards_; }

  /// Return the unit that holds `parameter`, and its segment there.
  int64_t unit_of(int64_t parameter) const { return places_[static_cast<size_t>(parameter)].unit; }
  const Segment& segment_of(int64_t parameter) const;

  /// Returns the elements of a slice of `unit`: numel / N.
  int64_t slice_numel(int64_t unit) const { return this->unit(unit).numel / shards_; }
  /// Returns the slice of `unit` that `rank` owns.
  Range slice(int64_t unit, int rank) const;

  /// Return the number of elements of all parameters (Psi), and of all units with their padding.
  int64_t content() const;
  int64_t numel() const;

 private:
  struct Place {
    int64_t unit = 0;
    int64_t segment = 0;
  };
  std::vector<Parameter> parameters_;
  std::vector<Unit> units_;
  std::vector<Place> places_;
  int shards_;
};

}  // namespace zero::partition
