#include "zero/train/weights.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "zero/base/error.h"
#include "zero/checkpoint/file.h"
#include "zero/train/agreement.h"

namespace zero::train {
namespace {

void write_text(const std::filesystem::path& path, const std::string& text) {
  OutputFile file(path, fail<CheckpointError>);
  file.write(text.data(), text.size());
  file.commit();
}

/// The header of a safetensors file that holds the model's parameters in registration order: its
/// length, then JSON, padded so that the data starts on a multiple of 8 bytes.
std::string header_of(const Gpt2& model, bool bf16) {
  nlohmann::ordered_json header{{"__metadata__", {{"format", "pt"}}}};
  int64_t offset = 0;
  for (const auto& parameter : model->named_parameters()) {
    const int64_t bytes = parameter.value().numel() * (bf16 ? 2 : 4);
    header[parameter.key()] = {{"dtype", bf16 ? "BF16" : "F32"},
                               {"shape", parameter.value().sizes().vec()},
                               {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string json = header.dump();
  json.append((8 - json.size() % 8) % 8, ' ');
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + json;
}

}  // namespace

void write_weights(Engine& engine, const Gpt2& model, const RunFolder& folder) {
  const bool writes = engine.group().rank() == 0;
  std::optional<OutputFile> file;
  std::exception_ptr failure;
  const auto attempt = [&](const auto& body) {
    if (!writes || failure) return;
    try {
      body();
    } catch (const Error&) {
      failure = std::current_exception();  // the walk over the parameters is collective: it goes on
    }
  };
  attempt([&] {
    file.emplace(folder.model(), fail<CheckpointError>);
    const auto header = header_of(model, engine.config().bf16);
    file->write(header.data(), header.size());
  });
  engine.visit_parameters([&](const std::string&, const at::Tensor& value) {
    attempt([&] {
      const auto flat = value.contiguous();
      file->write(flat.data_ptr(), flat.nbytes());
    });
  });
  attempt([&] {
    file->commit();
    write_text(folder.model_config(), model->config().to_json() + "\n");
  });
  file.reset();
  share_failure(engine.group(), failure);
}

}  // namespace zero::train
