// Tells what a JSON file is that was given in the place of another. Models, trainings, inference
// and machines are all described in JSON, and are easily mistaken for each other.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

namespace zero {

enum class JsonKind : uint8_t { unknown, model, training, inference, machines };

/// Returns what an object is, by keys that only files of that kind have.
template <class Json>
JsonKind kind_of(const Json& object) {
  const auto has_any = [&](const auto& keys) {
    return std::ranges::any_of(keys, [&](const char* key) { return object.contains(key); });
  };
  constexpr std::array kTraining{"zero_optimization",
                                 "train_batch_size",
                                 "train_micro_batch_size_per_gpu",
                                 "optimizer",
                                 "scheduler",
                                 "gradient_accumulation_steps",
                                 "gradient_clipping",
                                 "train",
                                 "activation_checkpointing"};
  constexpr std::array kModel{"model_type", "architectures", "n_embd", "hidden_size", "n_layer"};
  constexpr std::array kInference{"dtype",
                                  "replace_with_kernel_inject",
                                  "kernel_inject",
                                  "injection_policy",
                                  "replace_method",
                                  "max_out_tokens",
                                  "min_out_tokens",
                                  "mp_size",
                                  "return_tuple",
                                  "set_empty_params",
                                  "enable_cuda_graph",
                                  "save_mp_checkpoint_path"};
  constexpr std::array kMachines{"per_host", "hosts", "host_memory", "flops", "nvme_bytes"};
  if (has_any(kTraining)) return JsonKind::training;
  if (has_any(kModel)) return JsonKind::model;
  if (has_any(kMachines)) return JsonKind::machines;
  if (has_any(kInference)) return JsonKind::inference;
  return JsonKind::unknown;
}

/// Returns what a file of this kind is and who takes it, as the end of "The file x is ...".
constexpr std::string_view what_it_is(JsonKind kind) {
  switch (kind) {
    case JsonKind::model:
      return "a model's config.json, which --model takes";
    case JsonKind::training:
      return "a configuration of training (ds_config.json), which `zero train --config` takes";
    case JsonKind::inference:
      return "a configuration of inference, which DeepSpeed's init_inference takes; libzero has "
             "nothing that does";
    case JsonKind::machines:
      return "a description of machines, which `zero plan --hardware` takes";
    case JsonKind::unknown:
      break;
  }
  return "of no kind that libzero knows";
}

}  // namespace zero
