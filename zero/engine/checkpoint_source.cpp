// Reads a checkpoint at any number of ranks: it puts the elements that a rank asks for together
// from the slices that hold them.
#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/in_force.h"
#include "zero/engine/state_sink.h"
#include "zero/engine/state_source.h"

namespace zero {

using partition::Range;

namespace {

constexpr std::string_view kParameter = "parameter";
constexpr std::string_view kMaster = "master";

bool is_coded(const Manifest::State& state) { return state.format.starts_with("8bit"); }

optim::Sign sign_of(const Manifest::State& state) {
  return state.format == "8bit_positive" ? optim::Sign::positive : optim::Sign::either;
}

// Returns the names of an optimizer's states.
std::set<std::string> moments_of(const Manifest::Parameter& parameter) {
  std::set<std::string> names;
  for (const auto& state : parameter.states) {
    if (state.name != kParameter && state.name != kMaster && state.name != kInForce)
      names.insert(state.name);
  }
  for (const auto& [name, shape] : parameter.factored) names.insert(name);
  return names;
}

std::string described(const Manifest::Parameter& parameter) {
  const auto moments = moments_of(parameter);
  return fmt::format("{} ({})", parameter.optimizer,
                     moments.empty() ? "no states" : fmt::format("{}", fmt::join(moments, ", ")));
}

std::optional<TensorInfo> find_buffer(const Manifest& manifest, const std::string& name) {
  const auto& all = manifest.buffers;
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const TensorInfo& each) { return each.name == name; });
  return found == all.end() ? std::nullopt : std::optional(*found);
}

// Weights of other programs do not say which of them are buffers: those are with the parameters
// that have no optimizer.
std::optional<TensorInfo> as_buffer(const Manifest::Parameter& parameter) {
  const auto* state = parameter.find(kParameter);
  const auto dtype = state == nullptr ? std::nullopt : safetensors_dtype(state->format);
  if (!parameter.optimizer.empty() || !dtype) return {};
  return TensorInfo{parameter.name, *dtype, parameter.shape};
}

// Throws CheckpointError, naming both sides, if a checkpoint does not suit the model.
class Suits {
 public:
  Suits(const std::filesystem::path& folder, const Manifest& theirs) : folder_(folder) {
    for (size_t p = 0; p < theirs.parameters.size(); ++p) {
      index_[theirs.parameters[p].name] = p;
      for (const auto& other : theirs.parameters[p].other_names) index_[other] = p;
    }
    theirs_ = &theirs;
  }

  // Returns the number that each parameter of `ours` has in the checkpoint.
  std::vector<size_t> check(const Manifest& ours) {
    std::vector<size_t> places;
    std::vector<bool> taken(theirs_->parameters.size(), false);
    for (const auto& parameter : ours.parameters) {
      places.push_back(find(parameter));
      check(parameter, theirs_->parameters[places.back()]);
      taken[places.back()] = true;
      // Other programs save tied tensors once for each name.
      if (const auto found = index_.find(parameter.name); found != index_.end())
        taken[found->second] = true;
      for (const auto& other : parameter.other_names) {
        if (const auto found = index_.find(other); found != index_.end())
          taken[found->second] = true;
      }
    }
    for (const auto& buffer : ours.buffers) check(buffer, taken);
    const auto left = std::find(taken.begin(), taken.end(), false);
    if (left != taken.end()) {
      refuse(fmt::format("has a parameter '{}', and the model has {} parameters without it",
                         theirs_->parameters[static_cast<size_t>(left - taken.begin())].name,
                         ours.parameters.size()));
    }
    return places;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    throw CheckpointError(fmt::format("'{}' {}.", folder_.string(), why));
  }

  size_t find(const Manifest::Parameter& parameter) const {
    auto found = index_.find(parameter.name);
    for (const auto& other : parameter.other_names) {
      const auto next = index_.find(other);
      if (next == index_.end()) continue;
      // If both names are there, one of them has the states.
      if (found == index_.end() || !theirs_->parameters[next->second].optimizer.empty())
        found = next;
    }
    if (found != index_.end()) return found->second;
    std::vector<std::string> known;
    for (const auto& each : theirs_->parameters) known.push_back(each.name);
    refuse(
        fmt::format("holds {} parameters and no '{}', which the model has: it is of another "
                    "model.{}",
                    known.size(), parameter.name, did_you_mean(parameter.name, known)));
  }

  void check(const Manifest::Parameter& ours, const Manifest::Parameter& theirs) const {
    const auto differ = [&](const char* what, const auto& saved, const auto& here) {
      refuse(fmt::format("holds parameter '{}' with {} [{}], but the model has it with [{}]",
                         ours.name, what, fmt::join(saved, ","), fmt::join(here, ",")));
    };
    if (theirs.shape != ours.shape) differ("shape", theirs.shape, ours.shape);
    if (theirs.strides != ours.strides) differ("strides", theirs.strides, ours.strides);
    if (theirs.find(kParameter) == nullptr)
      refuse(fmt::format("holds no values of parameter '{}'", ours.name));
    if (ours.optimizer.empty() || theirs.optimizer.empty()) return;  // frozen, then or now
    if (theirs.optimizer != ours.optimizer || moments_of(theirs) != moments_of(ours)) {
      refuse(
          fmt::format("holds states of {} for parameter '{}', but this run trains it by {}. "
                      "Load it with the same optimizer, or its weights alone (save_full, and "
                      "load_weights)",
                      described(theirs), ours.name, described(ours)));
    }
    if (theirs.factored != ours.factored)
      refuse(fmt::format("holds factored states of other shapes for parameter '{}'", ours.name));
  }

  void check(const TensorInfo& ours, std::vector<bool>& taken) const {
    auto found = find_buffer(*theirs_, ours.name);
    if (const auto parameter = index_.find(ours.name); !found && parameter != index_.end()) {
      found = as_buffer(theirs_->parameters[parameter->second]);
      taken[parameter->second] = true;
    }
    if (!found) refuse(fmt::format("holds no buffer '{}', which the model has", ours.name));
    const bool converts = at::isFloatingType(found->dtype) && at::isFloatingType(ours.dtype);
    if (found->shape == ours.shape && (converts || found->dtype == ours.dtype)) return;
    refuse(fmt::format("holds buffer '{}' as {} [{}], but the model has it as {} [{}]", ours.name,
                       c10::toString(found->dtype), fmt::join(found->shape, ","),
                       c10::toString(ours.dtype), fmt::join(ours.shape, ",")));
  }

  const std::filesystem::path& folder_;
  const Manifest* theirs_ = nullptr;
  std::unordered_map<std::string, size_t> index_;
};

class SliceReader final : public StateSource {
 public:
  SliceReader(const StateParts& parts, std::filesystem::path folder, Manifest manifest, int rank)
      : parts_(parts), folder_(std::move(folder)), manifest_(std::move(manifest)), rank_(rank) {
    places_ = Suits(folder_, manifest_).check(describe(parts, {}));
    pieces_.resize(manifest_.parameters.size());
    for (size_t f = 0; f < manifest_.files.size(); ++f) {
      for (const auto& slice : manifest_.files[f].slices)
        pieces_[static_cast<size_t>(slice.parameter)].push_back({{slice.begin, slice.end}, f});
    }
    for (auto& list : pieces_) {
      std::sort(list.begin(), list.end(),
                [](const Piece& a, const Piece& b) { return a.elements.begin < b.elements.begin; });
    }
    factored_files_ = manifest_.factored_files();
    progress_ = make_progress();
  }

  Progress progress() const override { return progress_; }

  bool has(int64_t parameter, State moment) const override {
    return theirs(parameter).find(name(parameter, moment)) != nullptr;
  }

  at::Tensor read(int64_t parameter, State state, Range elements) const override {
    const auto& from = theirs(parameter);
    const auto& plan = parts_.table.plan(parts_.layout.unit_of(parameter));
    // Master weights have all bits, but parameters of the same dtype may have been written since.
    const auto* stored = from.find(name(parameter, state));
    if (state < State::first_moment) {
      const auto* master = from.find(kMaster);
      const auto* weights = from.find(kParameter);
      const bool same = weights->format == safetensors_name(plan.dtype);
      stored = master != nullptr && (state == State::master || !same) ? master : weights;
    }
    const size_t place = places_[static_cast<size_t>(parameter)];
    if (!is_coded(*stored)) return gather(place, *stored, elements);
    constexpr int64_t kBlock = optim::kCodedBlock;
    const Range blocks{elements.begin / kBlock * kBlock,
                       std::min(at::round_up(elements.end, kBlock), from.numel())};
    auto codes = gather(place, *stored, blocks);
    if (plan.is_coded(state)) return codes;
    const auto values = at::empty({blocks.size()}, at::kFloat);
    optim::decode(static_cast<const std::byte*>(codes.const_data_ptr()),
                  values.mutable_data_ptr<float>(), values.numel(), sign_of(*stored));
    return values.narrow(0, elements.begin - blocks.begin, elements.size());
  }

  bool has_in_force() const override { return zero::has_in_force(manifest_); }

  at::Tensor in_force(int64_t parameter, Range elements) const override {
    const auto* stored = theirs(parameter).find(kInForce);
    if (stored == nullptr) return read(parameter, State::parameters, elements);
    return gather(places_[static_cast<size_t>(parameter)], *stored, elements);
  }

  at::Tensor factored(int64_t parameter, std::string_view state) const override {
    const auto& from = theirs(parameter);
    if (from.factored.empty()) return {};
    const size_t place = places_[static_cast<size_t>(parameter)];
    return file(factored_files_[place]).read(slice_key(state, from.name));
  }

  at::Tensor buffer(size_t index) const override {
    const auto of = static_cast<size_t>(rank_) % manifest_.files.size();
    const auto& name = parts_.model.buffers()[index].first;
    if (find_buffer(manifest_, name)) return file(of).read(buffer_key(name));
    const auto& all = manifest_.parameters;
    const auto found = std::find_if(
        all.begin(), all.end(), [&](const Manifest::Parameter& each) { return each.name == name; });
    return gather(static_cast<size_t>(found - all.begin()), *found->find(kParameter),
                  {0, found->numel()})
        .view(found->shape);
  }

 private:
  struct Piece {
    Range elements;
    size_t file = 0;
  };

  const Manifest::Parameter& theirs(int64_t parameter) const {
    return manifest_.parameters[places_[static_cast<size_t>(parameter)]];
  }
  std::string_view name(int64_t parameter, State state) const {
    return parts_.table.name(parts_.layout.unit_of(parameter), state);
  }

  Progress make_progress() const {
    Progress progress{.steps = manifest_.steps,
                      .parameter_steps = {},
                      .loss_scale = {},
                      .grad_norm = manifest_.grad_norm};
    for (int64_t p = 0; p < parts_.model.size(); ++p) {
      const bool begins = theirs(p).optimizer.empty();  // it was frozen
      progress.parameter_steps.push_back(begins ? 0 : theirs(p).steps);
    }
    progress.loss_scale = continued_scale(parts_.config, manifest_.loss_scale, folder_.string());
    return progress;
  }

  // Returns elements of a state as they are stored; of 8-bit codes, the bytes of whole blocks.
  at::Tensor gather(size_t parameter, const Manifest::State& state, Range elements) const {
    const auto key = slice_key(state.name, manifest_.parameters[parameter].name);
    const auto entries = [&](int64_t count) {
      return is_coded(state) ? at::ceil_div(count, optim::kCodedBlock) * optim::kCodedBytes : count;
    };
    const auto& list = pieces_[parameter];
    auto piece = std::upper_bound(
        list.begin(), list.end(), elements.begin,
        [](int64_t element, const Piece& each) { return element < each.elements.end; });
    at::Tensor whole;
    for (; piece != list.end() && piece->elements.begin < elements.end; ++piece) {
      const auto mine = partition::intersect(piece->elements, elements);
      const auto from = entries(mine.begin - piece->elements.begin);
      auto values = file(piece->file).read(key, from, entries(mine.size()));
      if (mine == elements) return values;
      if (!whole.defined()) whole = at::empty({entries(elements.size())}, values.scalar_type());
      whole.narrow(0, entries(mine.begin - elements.begin), values.numel()).copy_(values);
    }
    return whole;
  }

  const SafetensorsReader& file(size_t index) const {
    constexpr size_t kOpen = 64;  // the most files that are open at once
    auto found = open_.find(index);
    if (found == open_.end()) {
      if (open_.size() == kOpen) open_.clear();
      auto reader = std::make_unique<SafetensorsReader>(folder_ / manifest_.files[index].name);
      found = open_.emplace(index, std::move(reader)).first;
    }
    return *found->second;
  }

  StateParts parts_;
  std::filesystem::path folder_;
  Manifest manifest_;
  int rank_;
  std::vector<size_t> places_;              // by parameter of the model
  std::vector<std::vector<Piece>> pieces_;  // by parameter of the checkpoint, in order
  std::vector<size_t> factored_files_;      // by parameter of the checkpoint
  Progress progress_;
  mutable std::map<size_t, std::unique_ptr<SafetensorsReader>> open_;
};

}  // namespace

std::vector<std::string> files_needed(const StateParts& parts, const std::filesystem::path& folder,
                                      const Manifest& manifest, int rank) {
  const auto places = Suits(folder, manifest).check(describe(parts, {}));
  std::vector<std::vector<Range>> mine(manifest.parameters.size());  // whole blocks of 8-bit codes
  for (int64_t u = 0; u < parts.layout.unit_count(); ++u) {
    for (const auto& segment : parts.layout.unit(u).segments) {
      const auto owned = partition::intersect(segment.range(), parts.table.plan(u).owned);
      if (owned.begin >= owned.end) continue;
      constexpr int64_t kBlock = optim::kCodedBlock;
      mine[places[static_cast<size_t>(segment.parameter)]].push_back(
          {(owned.begin - segment.offset) / kBlock * kBlock,
           at::round_up(owned.end - segment.offset, kBlock)});
    }
  }
  const auto factored_files = manifest.factored_files();
  std::set<size_t> factored;
  for (int64_t p = 0; p < parts.model.size(); ++p) {
    const size_t place = places[static_cast<size_t>(p)];
    const auto& states = parts.factored.of(p);
    const bool here = !states.empty() && states.front().values.defined();
    if (here && !manifest.parameters[place].factored.empty())
      factored.insert(factored_files[place]);
  }
  std::vector<std::string> names;
  for (const auto& file : manifest.files) {
    const auto is_needed = [&](const Manifest::Slice& slice) {
      const auto& ranges = mine[static_cast<size_t>(slice.parameter)];
      return std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
        return slice.begin < range.end && range.begin < slice.end;
      });
    };
    if (&file == &manifest.file_of(rank) ||
        factored.contains(static_cast<size_t>(&file - manifest.files.data())) ||
        std::any_of(file.slices.begin(), file.slices.end(), is_needed))
      names.push_back(file.name);
  }
  return names;
}

std::unique_ptr<StateSource> open_slices(const StateParts& parts,
                                         const std::filesystem::path& folder, Manifest manifest,
                                         int rank) {
  return std::make_unique<SliceReader>(parts, folder, std::move(manifest), rank);
}

}  // namespace zero
