#include "zero/data/labelled_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "zero/base/class_names.h"
#include "zero/base/error.h"

namespace zero {

Classes classes_of(const std::vector<Label>& labels) {
  Classes classes;
  if (!labels.empty() && labels.front().number) {
    int64_t largest = 0;
    for (const auto& label : labels) {
      largest = std::max(largest, *label.number);
      classes.numbers.push_back(static_cast<int32_t>(*label.number));
    }
    classes.names = class_names(largest + 1);
    return classes;
  }
  std::map<std::string, int32_t> number;
  for (const auto& label : labels) number[label.name] = 0;
  for (auto& [name, place] : number) {
    place = static_cast<int32_t>(classes.names.size());
    classes.names.push_back(name);
  }
  for (const auto& label : labels) classes.numbers.push_back(number.at(label.name));
  return classes;
}

bool are_numbers(const std::vector<std::string>& classes) {
  return classes == class_names(static_cast<int64_t>(classes.size()));
}

std::vector<int64_t> classes_in(const std::vector<std::string>& model,
                                const std::vector<std::string>& data) {
  std::vector<int64_t> found(data.size());
  if (are_numbers(data) && data.size() <= model.size()) {
    std::iota(found.begin(), found.end(), 0);
    return found;
  }
  for (size_t i = 0; i < data.size(); ++i) {
    const auto at = std::find(model.begin(), model.end(), data[i]);
    if (at == model.end()) {
      throw DataError(
          fmt::format("The data have the label {}, which is not among the model's classes ({}). "
                      "Name the classes in id2label of the model's config.json.",
                      are_numbers(data) ? std::to_string(data.size() - 1) : "'" + data[i] + "'",
                      fmt::join(model, ", ")));
    }
    found[i] = at - model.begin();
  }
  return found;
}

}  // namespace zero
