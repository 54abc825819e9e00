#include "zero/train/weights.h"

#include <exception>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/checkpoint/safetensors.h"
#include "zero/train/agreement.h"

namespace zero::train {
namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
  OutputFile file(path, fail<CheckpointError>);
  file.write(text.data(), text.size());
  file.commit();
}

/// The model's parameters in registration order, in the dtype in which the engine keeps them.
std::vector<TensorInfo> declarations(const Gpt2& model, bool bf16) {
  std::vector<TensorInfo> tensors;
  for (const auto& parameter : model->named_parameters()) {
    tensors.push_back(
        {parameter.key(), bf16 ? at::kBFloat16 : at::kFloat, parameter.value().sizes().vec()});
  }
  return tensors;
}

}  // namespace

void write_weights(Engine& engine, const Gpt2& model, const RunFolder& folder) {
  const bool writes = engine.group().rank() == 0;
  std::optional<SafetensorsWriter> file;
  std::exception_ptr failure;
  const auto attempt = [&](const auto& body) {
    if (!writes || failure) return;
    try {
      body();
    } catch (const Error&) {
      failure = std::current_exception();  // the walk over the parameters is collective: it goes on
    }
  };
  const std::map<std::string, std::string> metadata{
      {"format", "pt"}};  // Hugging Face's loader asks for it
  attempt(
      [&] { file.emplace(folder.model(), declarations(model, engine.config().bf16), metadata); });
  engine.visit_parameters([&](const std::string& name, const at::Tensor& value) {
    attempt([&] { file->write(name, value); });
  });
  attempt([&] {
    file->commit();
    write_text(folder.model_config(), model->config().to_json() + "\n");
  });
  file.reset();
  share_failure(engine.group(), failure);
}

}  // namespace zero::train
