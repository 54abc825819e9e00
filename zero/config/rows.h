// How the files of this folder write rows of the table. Private: it includes nlohmann-json.
#pragma once

#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/config/fields.h"

namespace zero::fields {

using All = std::vector<Field<Settings>>;

/// The rows of one struct of Settings that stand in one section of the file.
template <class... Member>
class Rows {
 public:
  Rows(std::vector<Field<Settings>>& all, Part part, std::string section, Member... path)
      : all_(all), part_(part), section_(std::move(section)), path_(path...) {
    if (!section_.empty()) section_ += '.';
  }

  template <class... Rest>
  void add(const char* key, About about, Rest... rest) {
    auto row = std::apply(
        [&](auto... path) {
          return field<Settings>(section_ + key, std::move(about), path..., rest...);
        },
        path_);
    row.part = part_;
    all_.push_back(std::move(row));
  }
  /// Adds keys that change nothing by themselves. They are checked, and reported as Note [What
  /// becomes of a key] says.
  template <class Value>
  void accept(std::initializer_list<const char*> keys, const About& about) {
    for (const auto* key : keys) {
      all_.push_back(accepted<Settings, Value>(section_ + key, about));
      all_.back().part = part_;
    }
  }

 private:
  std::vector<Field<Settings>>& all_;
  Part part_;
  std::string section_;
  std::tuple<Member...> path_;
};

/// Adds the section `scheduler`.
void add_scheduler(All& all);
/// Adds the sections of monitors that act, and `flops_profiler`.
void add_monitors(All& all);
/// Adds the other keys of files written for DeepSpeed: those that need no choice here, those of
/// features that libzero does not have, and old names.
void add_deepspeed(All& all);

}  // namespace zero::fields
