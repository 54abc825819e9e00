// Reads and writes files of tensors in the format of torch.save (`.pt`, `.bin`).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace zero {

/// Reads the tensors of a file that torch.save has written, in any of its forms, and runs nothing
/// that the file says. Tensors may lie in nested dicts and lists: their names are the keys, joined
/// by dots ("model.fc1.weight", "optimizer.state.0.exp_avg"). Other values are left out. The
/// tensors are on the CPU, in the order of the file, with the file's shapes, strides and dtypes;
/// tensors that share a storage in the file share its memory. Throws CheckpointError, which names
/// the file, if it is damaged (checksums are compared if it has them), is not of torch.save, or has
/// big-endian numbers.
std::vector<std::pair<std::string, at::Tensor>> load_pt(const std::filesystem::path& path);

/// Writes a dict of tensors on any device, whole or not at all. torch.load(weights_only=True) and
/// `load_pt` read it. Tensors that share a storage share it in the file, which then has the whole
/// storage. Throws CheckpointError if the file cannot be written, two names are the same, or a
/// dtype has no name in such files.
void save_pt(const std::filesystem::path& path,
             const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace zero
