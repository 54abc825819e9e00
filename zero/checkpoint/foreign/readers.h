// The readers of the forms of checkpoints, and the functions that they share.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "zero/checkpoint/foreign/checkpoint_view.h"
#include "zero/checkpoint/foreign/pt_file.h"

namespace zero::foreign {

/// Each `is_` function returns whether a path has this form, and each `view_` function returns the
/// view.
bool is_deepspeed(const std::filesystem::path& path);
CheckpointView view_deepspeed(const std::filesystem::path& path, bool weights_only);
bool is_distributed(const std::filesystem::path& path);
CheckpointView view_distributed(const std::filesystem::path& path);
CheckpointView view_weights(const std::filesystem::path& path);
CheckpointView view_own(const std::filesystem::path& path);

/// Elements [begin, begin + count) of a tensor in a file, in row-major order.
struct Part {
  StoredTensor tensor;
  int64_t begin = 0;
  int64_t count = 0;
};
/// Returns the tensor of this shape whose elements are those of the parts, one part after the
/// other. The parts must have exactly its number of elements.
LazyTensor join(std::vector<Part> parts, std::vector<int64_t> shape);
/// Returns a stored tensor as a lazy one.
LazyTensor lazy(const StoredTensor& tensor);
/// Returns a text for `left_out` about names that have a common reason: the first few of them, and
/// how many there are.
std::string listed(const std::vector<std::string>& names, const std::string& why);

/// Returns the optimizer that has these states and hyper-parameters. They have the names of
/// torch.optim and DeepSpeed ({"lr", "betas", "weight_decay", ...}).
Optimizer optimizer_of(const nlohmann::json& group, const std::set<std::string>& states);
/// Returns whether libzero has a state of this name.
bool is_state(std::string_view name);
/// Returns the strides of a row-major tensor.
std::vector<int64_t> row_major(const std::vector<int64_t>& shape);

}  // namespace zero::foreign
