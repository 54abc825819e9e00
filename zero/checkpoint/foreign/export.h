// Writes views of checkpoints in the forms that other programs read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "zero/checkpoint/foreign/checkpoint_view.h"

namespace zero::foreign {

// Each function writes a folder, whole or not at all; the folder must be absent or empty. Each
// returns the parts of the view that the form has no place for, and throws CheckpointError if it
// fails.

/// Writes safetensors files of at most `shard_bytes` with an index, as Hugging Face's
/// from_pretrained reads them. They have weights and buffers, in the dtypes of the checkpoint.
std::vector<std::string> export_huggingface(const CheckpointView& view,
                                            const std::filesystem::path& to, int64_t shard_bytes);
/// Writes a universal checkpoint, which DeepSpeed loads with `load_universal` at stages 1 to 3.
std::vector<std::string> export_deepspeed(const CheckpointView& view,
                                          const std::filesystem::path& to);
/// Writes a folder of torch.distributed.checkpoint with "model" and "optim", with the names that
/// get_state_dict gives.
std::vector<std::string> export_distributed(const CheckpointView& view,
                                            const std::filesystem::path& to);

}  // namespace zero::foreign
