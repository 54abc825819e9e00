// An optimizer's hyper-parameters (zero/optim/algorithm.h) as rows of the table of settings.
// Private: it includes nlohmann-json.
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "zero/config/field.h"
#include "zero/optim/algorithm.h"

namespace zero::fields {

template <class T>
About about_of(const optim::HyperParameter<T>& row) {
  std::vector<std::string_view> also;
  if (!row.also.empty()) also.push_back(row.also);
  return {.sentence = row.sentence,
          .details = row.details,
          .option = row.option,
          .also = std::move(also),
          .least = row.least,
          .most = row.most,
          .below = row.below};
}

template <class T, class Value>
Field<T> row_of_given(const optim::HyperParameter<T>& row, const std::string& key,
                      const optim::Given<T, Value>& given) {
  auto made = field<T>(key, about_of(row), given.member);
  made.set = [given](T& optimizer, const Json& value) { given.set(optimizer, value.get<Value>()); };
  if (!row.written) made.get = {};
  return made;
}

template <class T>
Field<T> row_of(const optim::HyperParameter<T>& row) {
  const std::string key(row.key);
  return std::visit(
      [&](const auto& value) -> Field<T> {
        using Value = std::remove_cvref_t<decltype(value)>;
        if constexpr (std::is_same_v<Value, typename optim::HyperParameter<T>::Pair>) {
          return {Spec{key, about_of(row), Kind::pair},
                  [value](T& optimizer, const Json& pair) {
                    optimizer.*value.first = pair[0].get<double>();
                    optimizer.*value.second = pair[1].get<double>();
                  },
                  [value](const T& optimizer) {
                    return Json::array({optimizer.*value.first, optimizer.*value.second});
                  }};
        } else if constexpr (std::is_same_v<Value, typename optim::HyperParameter<T>::PairOrNull>) {
          auto about = about_of(row);
          about.null_first = true;
          return {Spec{key, std::move(about), Kind::pair},
                  [value](T& optimizer, const Json& pair) {
                    optimizer.*value.first = from_json<std::optional<double>>(pair[0]);
                    optimizer.*value.second = pair[1].get<double>();
                  },
                  [value](const T& optimizer) {
                    return Json::array({to_json(optimizer.*value.first), optimizer.*value.second});
                  }};
        } else if constexpr (std::is_same_v<Value, optim::Given<T>> ||
                             std::is_same_v<Value, optim::Given<T, bool>>) {
          return row_of_given(row, key, value);
        } else if constexpr (std::is_same_v<Value, optim::Ignored>) {
          if (value == optim::Ignored::boolean) return accepted<T, bool>(key, about_of(row));
          if (value == optim::Ignored::number) return accepted<T, double>(key, about_of(row));
          return accepted<T, std::string>(key, about_of(row));
        } else if constexpr (std::is_same_v<Value, optim::Instead>) {
          auto gone = about_of(row);
          gone.replaced_by = value.key;
          return accepted<T, double>(key, std::move(gone));
        } else if constexpr (std::is_same_v<Value, optim::Refused>) {
          auto about = about_of(row);
          about.refused = value.why;
          return accepted<T, double>(key, std::move(about));
        } else if constexpr (std::is_same_v<Value, optim::OnlyFalse>) {
          auto only = about_of(row);
          only.only = false;
          only.because = "libzero has no such variant of this optimizer";
          return accepted<T, bool>(key, std::move(only));
        } else {
          auto made = field<T>(key, about_of(row), value);
          if (!row.written) made.get = {};
          return made;
        }
      },
      row.value);
}

/// The rows of the `params` of optimizer T, and of the options of `zero train` that stand for them.
template <class T>
const std::vector<Field<T>>& hyper_parameters() {
  static const auto rows = [] {
    std::vector<Field<T>> all;
    for (const auto& row : T::algorithm().hyper_parameters) all.push_back(row_of(row));
    return all;
  }();
  return rows;
}

}  // namespace zero::fields
