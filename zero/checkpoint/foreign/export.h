// Writes views of checkpoints as other programs read them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "zero/checkpoint/foreign/checkpoint_view.h"

namespace zero::foreign {

// Each writes a folder, whole or not at all, which must not exist or be empty, and returns what
// the form has no place for. Each throws CheckpointError.

/// Safetensors files of at most `shard_bytes` with an index, as Hugging Face's from_pretrained
/// reads them: weights and buffers, in the dtypes of the checkpoint.
std::vector<std::string> export_huggingface(const CheckpointView& view,
                                            const std::filesystem::path& to, int64_t shard_bytes);
/// A universal checkpoint, which DeepSpeed loads with `load_universal` at stages 1 to 3.
std::vector<std::string> export_deepspeed(const CheckpointView& view,
                                          const std::filesystem::path& to);
/// A folder of torch.distributed.checkpoint with "model" and "optim", named as get_state_dict does.
std::vector<std::string> export_distributed(const CheckpointView& view,
                                            const std::filesystem::path& to);

}  // namespace zero::foreign
