// A text, or a pair of texts, that belongs to a class.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace zero {

/// The class of a text, by its name or by its number.
struct Label {
  std::string name;
  std::optional<int64_t> number{};
};

struct LabelledText {
  std::string text;
  std::optional<std::string> pair{};
  Label label{};
};

/// The classes of labels by number, and the number of each label.
struct Classes {
  std::vector<std::string> names;
  std::vector<int32_t> numbers;
};

/// Returns the classes of all labels of a data set: names in the order of their bytes; for numbers
/// LABEL_0, LABEL_1 and so on, up to the largest.
Classes classes_of(const std::vector<Label>& labels);

/// Returns whether these are the names of numbers.
bool are_numbers(const std::vector<std::string>& classes);

/// Returns, for each class of the data, that of the model. Names are looked up among the model's;
/// numbers stay as they are. Throws DataError for a class that the model does not have.
std::vector<int64_t> classes_in(const std::vector<std::string>& model,
                                const std::vector<std::string>& data);

}  // namespace zero
