// Files of tensors in the format of torch.save (`.pt`, `.bin`).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace zero {

/// Reads the tensors of a file that torch.save has written, in any of its forms, without running
/// anything that the file says. The names of tensors in dicts and lists within each other are their
/// keys, joined by dots ("model.fc1.weight", "optimizer.state.0.exp_avg"); other values are left
/// out. The tensors are on the CPU, of the file's shapes, strides and dtypes, in its order; those
/// that share a storage in the file share its memory. Throws CheckpointError, which names the file,
/// for one that is damaged (where it has checksums: by them too), not of torch.save, or whose
/// numbers are big-endian.
std::vector<std::pair<std::string, at::Tensor>> load_pt(const std::filesystem::path& path);

/// Writes a dict of tensors on any device, which torch.load(weights_only=True) and `load_pt` read,
/// whole or not at all. Tensors that share a storage share it in the file, which then has all of
/// it. Throws CheckpointError where the file cannot be written, two names are the same, or a dtype
/// has no name in such files.
void save_pt(const std::filesystem::path& path,
             const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace zero
