// An optimizer in configuration files: its names, and the rows of its section `params`.
// Private: it includes nlohmann-json.
//
// Note [An optimizer in configuration files]
// Each optimizer has a file in this folder, which defines its `optimizer_section`: the names that
// DeepSpeed and PyTorch give it, with the values that each name means, and a row for each key of
// `optimizer.params`. Rows take the limits of their numbers from the optimizer itself
// (optim/algorithm.h). Keys that several optimizers have are members of Params.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "zero/config/field.h"
#include "zero/optim/algorithm.h"

namespace zero::fields {

/// A name of an optimizer in files, where any case is accepted.
template <class T>
struct OptimizerName {
  std::string_view name;
  T defaults = {};  ///< the values of a file that says nothing more
  /// The name means an approximation of this optimizer; a warning says that the exact one runs.
  bool approximation = false;
  /// Sets the values that the name implies whatever the file says.
  void (*settle)(T&) = nullptr;
};

template <class T>
struct OptimizerSection {
  std::vector<OptimizerName<T>> names;  ///< documents name the first
  std::vector<Field<T>> rows;           ///< in the order in which they are read
};

template <class T>
const OptimizerSection<T>& optimizer_section();
template <>
const OptimizerSection<AdamW>& optimizer_section();
template <>
const OptimizerSection<Sgd>& optimizer_section();
template <>
const OptimizerSection<Adagrad>& optimizer_section();
template <>
const OptimizerSection<Lion>& optimizer_section();
template <>
const OptimizerSection<Lamb>& optimizer_section();
template <>
const OptimizerSection<Muon>& optimizer_section();
template <>
const OptimizerSection<Adafactor>& optimizer_section();
template <>
const OptimizerSection<ScheduleFreeAdamW>& optimizer_section();
template <>
const OptimizerSection<Apollo>& optimizer_section();

/// The rows of the `params` of optimizer T, and of the options of `zero train` that stand for them.
template <class T>
const std::vector<Field<T>>& hyper_parameters() {
  return optimizer_section<T>().rows;
}

/// Builds the rows of optimizer T.
template <class T>
class Params {
 public:
  /// Adds a row for a member.
  template <class Member>
  Params& add(const char* key, Member member, About about) {
    rows_.push_back(field<T>(key, limited(member, std::move(about)), member));
    return *this;
  }
  /// Adds a row for a member whose value in a file says something of other members too: `set` takes
  /// it. Without `written` another row writes the member.
  template <class Value>
  Params& add(const char* key, Value T::*member, void (*set)(T&, Value), About about,
              bool written = true) {
    add(key, member, std::move(about));
    rows_.back().set = [set](T& optimizer, const Json& value) {
      set(optimizer, value.get<Value>());
    };
    if (!written) rows_.back().get = {};
    return *this;
  }
  /// Adds a row for an array of two numbers, the first of which may be null if its member is
  /// optional.
  template <class First>
  Params& pair(const char* key, First T::*first, double T::*second, About about) {
    about.null_first = IsOptional<First>::value;
    rows_.push_back({Spec{key, std::move(about), Kind::pair},
                     [=](T& optimizer, const Json& pair) {
                       optimizer.*first = from_json<First>(pair[0]);
                       optimizer.*second = pair[1].get<double>();
                     },
                     [=](const T& optimizer) {
                       return Json::array({to_json(optimizer.*first), optimizer.*second});
                     }});
    return *this;
  }

  Params& lr(
      std::string_view sentence = "Learning rate; in `zero train` the peak of the schedule") {
    return add("lr", &T::lr, {.sentence = sentence, .option = "--lr", .common = true});
  }
  /// Adds the key "betas", and the options that stand for one of the two numbers.
  Params& betas(std::string_view sentence) {
    return pair("betas", &T::beta1, &T::beta2, {.sentence = sentence})
        .add("", &T::beta1,
             {.sentence = "First of an optimizer's betas: AdamW's first moment",
              .option = "--beta1"})
        .add("", &T::beta2,
             {.sentence = "Second of its betas: AdamW's second moment", .option = "--beta2"});
  }
  Params& weight_decay(std::string_view details = {}) {
    return add(
        "weight_decay", &T::weight_decay,
        {.sentence =
             "Weight decay; `zero train` applies it to matrices, but not to biases and norms",
         .details = details,
         .option = "--weight-decay"});
  }
  /// Adds keys that are checked and change nothing.
  template <class Value>
  Params& ignored(std::initializer_list<const char*> keys,
                  std::string_view sentence = "Accepted, without effect") {
    for (const auto* key : keys) rows_.push_back(accepted<T, Value>(key, {.sentence = sentence}));
    return *this;
  }
  /// Adds keys of DeepSpeed's optimizers that compress messages.
  Params& of_compression(std::initializer_list<const char*> keys) {
    return ignored<double>(keys, "Belongs to 1-bit optimizers; libzero compresses nothing");
  }
  /// Adds keys of variants that libzero does not have: only false is accepted.
  Params& lacking(std::initializer_list<const char*> keys) {
    for (const auto* key : keys) {
      rows_.push_back(
          accepted<T, bool>(key, {.sentence = "Must be false: libzero has no such variant",
                                  .only = false,
                                  .because = "libzero has no such variant of this optimizer"}));
    }
    return *this;
  }
  /// Adds a key that only one number is accepted for.
  Params& only(const char* key, double number, std::string_view sentence,
               std::string_view because) {
    rows_.push_back(
        accepted<T, double>(key, {.sentence = sentence, .only = number, .because = because}));
    return *this;
  }
  /// Adds a key that is refused, and says why.
  Params& refused(const char* key, std::string_view sentence, std::string_view why) {
    rows_.push_back(accepted<T, double>(key, {.sentence = sentence, .refused = why}));
    return *this;
  }
  /// Adds "max_grad_norm", which the key `gradient_clipping` replaces.
  Params& clipped_by_engine() {
    rows_.push_back(accepted<T, double>("max_grad_norm", {.sentence = "Clipping of gradients",
                                                          .replaced_by = "gradient_clipping"}));
    return *this;
  }

  std::vector<Field<T>> rows() { return std::move(rows_); }

 private:
  /// `about` with the limits that the optimizer itself gives the member.
  template <class Member>
  static About limited(Member member, About about) {
    for (const auto& limit : T::algorithm().limits) {
      std::visit(
          [&](auto number) {
            if constexpr (std::is_same_v<decltype(number), Member>) {
              if (number != member) return;
              about.least = limit.least;
              about.most = limit.most;
              about.below = limit.below;
            }
          },
          limit.member);
    }
    return about;
  }

  std::vector<Field<T>> rows_;
};

}  // namespace zero::fields
