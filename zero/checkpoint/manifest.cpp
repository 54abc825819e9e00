#include "zero/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "zero/base/hash.h"
#include "zero/base/json.h"
#include "zero/checkpoint/in_force.h"

namespace zero {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::string_view kChecksum = ",\"checksum\":\"";
constexpr std::string_view kEnd = "\"}\n";
constexpr size_t kDigits = 16;

uint64_t hash_of_text(std::string_view text) {
  return hash_of(std::as_bytes(std::span(text.data(), text.size())));
}

std::string to_hex(uint64_t value) { return fmt::format("{:016x}", value); }

std::optional<uint64_t> from_hex(std::string_view digits) {
  uint64_t value = 0;
  const auto* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value, 16);
  if (error != std::errc{} || stop != end || to_hex(value) != digits) return {};
  return value;
}

Json json_of(const Manifest::File& file) {
  std::string sums;
  for (const auto sum : file.sums.blocks) sums += to_hex(sum);
  auto slices = Json::array();
  for (const auto& slice : file.slices) slices.push_back({slice.parameter, slice.begin, slice.end});
  Json json{{"name", file.name},
            {"bytes", file.sums.bytes},
            {"checksums", std::move(sums)},
            {"slices", std::move(slices)}};
  if (!file.factored.empty()) json["factored"] = file.factored;
  if (!file.attached.empty()) json["attached"] = file.attached;
  return json;
}

Json json_of(const Manifest::Parameter& parameter) {
  Json json{{"name", parameter.name}};
  if (!parameter.other_names.empty()) json["other_names"] = parameter.other_names;
  json["shape"] = parameter.shape;
  json["strides"] = parameter.strides;
  json["optimizer"] = parameter.optimizer;
  json["group"] = parameter.group;
  json["steps"] = parameter.steps;
  json["states"] = Json::object();
  for (const auto& state : parameter.states) json["states"][state.name] = state.format;
  for (const auto& [name, shape] : parameter.factored) json["factored"][name] = shape;
  return json;
}

Json json_of(const Manifest& manifest) {
  Json json{{"format", Manifest::kFormat},
            {"version", version_of(manifest)},
            {"library", manifest.library},
            {"stage", manifest.stage},
            {"steps", manifest.steps},
            {"loss_scale", nullptr},
            {"groups", Json::array()},
            {"parameters", Json::array()},
            {"buffers", Json::array()},
            {"buffer_policy", manifest.buffer_policy},
            {"block_bytes", kSummedBlock},
            {"files", Json::array()},
            {"configuration", Json::parse(manifest.configuration)}};
  if (const auto& scale = manifest.loss_scale) {
    json["loss_scale"] = {
        {"scale", scale->scale}, {"clean", scale->clean}, {"hysteresis", scale->hysteresis}};
  }
  if (manifest.grad_norm) json["grad_norm"] = *manifest.grad_norm;
  for (const auto& group : manifest.groups) json["groups"].push_back(Json::parse(group));
  for (const auto& each : manifest.parameters) json["parameters"].push_back(json_of(each));
  for (const auto& [name, dtype, shape] : manifest.buffers) {
    json["buffers"].push_back(
        {{"name", name}, {"dtype", safetensors_name(dtype)}, {"shape", shape}});
  }
  for (const auto& each : manifest.files) json["files"].push_back(json_of(each));
  return json;
}

// The functions below read a manifest. The text's checksum was right, so if something does not fit,
// another program wrote it.

Manifest::File file_of(const Json& json) {
  Manifest::File file{.name = json.at("name").get<std::string>(),
                      .sums = {json.at("bytes").get<uint64_t>(), {}},
                      .slices = {},
                      .factored = {},
                      .attached = {}};
  if (file.name.find('/') != std::string::npos || !file.name.ends_with(".safetensors"))
    throw CheckpointError(fmt::format("names the file '{}'", excerpt(file.name)));
  const auto sums = json.at("checksums").get<std::string>();
  const uint64_t blocks = (file.sums.bytes + kSummedBlock - 1) / kSummedBlock;
  if (sums.size() != blocks * kDigits) {
    throw CheckpointError(fmt::format("has {} digits of checksums for the {} bytes of '{}'",
                                      sums.size(), file.sums.bytes, file.name));
  }
  for (size_t i = 0; i < sums.size(); i += kDigits) {
    const auto sum = from_hex(std::string_view(sums).substr(i, kDigits));
    if (!sum) throw CheckpointError("has a checksum that is no number of 16 digits");
    file.sums.blocks.push_back(*sum);
  }
  for (const auto& slice : json.at("slices")) {
    file.slices.push_back(
        {slice.at(0).get<int64_t>(), slice.at(1).get<int64_t>(), slice.at(2).get<int64_t>()});
  }
  if (json.contains("factored")) file.factored = json.at("factored").get<std::vector<int64_t>>();
  if (json.contains("attached")) file.attached = json.at("attached").get<Attached>();
  return file;
}

// States become the names of files in exports.
std::string state_name(const std::string& name) {
  if (!name.empty() && !name.starts_with('.') && name.find('/') == std::string::npos) return name;
  throw CheckpointError(fmt::format("names the state '{}'", excerpt(name)));
}

Manifest::Parameter parameter_of(const Json& json) {
  Manifest::Parameter parameter{.name = json.at("name").get<std::string>(),
                                .other_names = {},
                                .shape = json.at("shape").get<std::vector<int64_t>>(),
                                .strides = json.at("strides").get<std::vector<int64_t>>(),
                                .optimizer = json.at("optimizer").get<std::string>(),
                                .group = json.at("group").get<int64_t>(),
                                .steps = json.at("steps").get<int64_t>(),
                                .states = {},
                                .factored = {}};
  if (json.contains("other_names"))
    parameter.other_names = json.at("other_names").get<std::vector<std::string>>();
  for (const auto& [name, format] : json.at("states").items())
    parameter.states.push_back({state_name(name), format.get<std::string>()});
  if (json.contains("factored")) {
    for (const auto& [name, shape] : json.at("factored").items())
      parameter.factored.emplace_back(state_name(name), shape.get<std::vector<int64_t>>());
  }
  return parameter;
}

// Throws if ranges of a parameter are missing, or are there twice.
void check_slices(const Manifest& manifest) {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> found(manifest.parameters.size());
  for (const auto& file : manifest.files) {
    for (const int64_t parameter : file.factored) {
      if (parameter < 0 || parameter >= static_cast<int64_t>(found.size()))
        throw CheckpointError(fmt::format("has factored states of parameter {}", parameter));
    }
    for (const auto& slice : file.slices) {
      if (slice.parameter < 0 || slice.parameter >= static_cast<int64_t>(found.size()))
        throw CheckpointError(fmt::format("has a slice of parameter {}", slice.parameter));
      found[static_cast<size_t>(slice.parameter)].emplace_back(slice.begin, slice.end);
    }
  }
  for (size_t p = 0; p < found.size(); ++p) {
    std::sort(found[p].begin(), found[p].end());
    int64_t end = 0;
    for (const auto& range : found[p]) {
      if (range.first != end || range.second < end) break;
      end = range.second;
    }
    const auto& parameter = manifest.parameters[p];
    if (end == parameter.numel()) continue;
    throw CheckpointError(
        fmt::format("has slices of '{}' that do not give each of its {} elements once: they fit up "
                    "to element {}",
                    parameter.name, parameter.numel(), end));
  }
}

Manifest manifest_of(const Json& json) {
  Manifest manifest;
  manifest.library = json.at("library").get<std::string>();
  manifest.stage = json.at("stage").get<int64_t>();
  manifest.configuration = json.at("configuration").dump();
  manifest.steps = json.at("steps").get<int64_t>();
  if (const auto& scale = json.at("loss_scale"); !scale.is_null()) {
    manifest.loss_scale = LossScaleState{.scale = scale.at("scale").get<double>(),
                                         .clean = scale.at("clean").get<int64_t>(),
                                         .hysteresis = scale.at("hysteresis").get<int64_t>()};
  }
  if (json.contains("grad_norm")) {
    manifest.grad_norm = json.at("grad_norm").get<double>();
    if (!(*manifest.grad_norm >= 0))
      throw CheckpointError(fmt::format("has the gradient norm {}", *manifest.grad_norm));
  }
  for (const auto& group : json.at("groups")) manifest.groups.push_back(group.dump());
  for (const auto& each : json.at("parameters")) manifest.parameters.push_back(parameter_of(each));
  for (const auto& each : json.at("buffers")) {
    const auto dtype = safetensors_dtype(each.at("dtype").get<std::string>());
    if (!dtype) throw CheckpointError("has a buffer of an unknown dtype");
    manifest.buffers.push_back(
        {each.at("name").get<std::string>(), *dtype, each.at("shape").get<std::vector<int64_t>>()});
  }
  manifest.buffer_policy = json.at("buffer_policy").get<std::string>();
  if (json.at("block_bytes").get<size_t>() != kSummedBlock)
    throw CheckpointError(
        fmt::format("has checksums of blocks that are not {} bytes", kSummedBlock));
  for (const auto& each : json.at("files")) manifest.files.push_back(file_of(each));
  if (manifest.files.empty()) throw CheckpointError("names no file");
  check_slices(manifest);
  return manifest;
}

// Checks the text's checksum, and returns the text without it.
std::string_view checked(std::string_view text, const fs::path& path) {
  const size_t tail = kChecksum.size() + kDigits + kEnd.size();
  if (text.size() > tail) {
    const auto body = text.substr(0, text.size() - tail);
    auto rest = text.substr(body.size());
    if (rest.starts_with(kChecksum) && rest.ends_with(kEnd) &&
        rest.substr(kChecksum.size(), kDigits) == to_hex(hash_of_text(body)))
      return body;
  }
  throw DamagedCheckpoint(
      fmt::format("'{}' is damaged: its checksum is not that of its {} bytes. Load another "
                  "checkpoint.",
                  path.string(), text.size()));
}

}  // namespace

const char* library_version() { return ZERO_VERSION; }

int64_t Manifest::Parameter::numel() const {
  int64_t numel = 1;
  for (const auto size : shape) numel *= size;
  return numel;
}

const Manifest::State* Manifest::Parameter::find(std::string_view state) const {
  const auto found = std::find_if(states.begin(), states.end(),
                                  [&](const State& each) { return each.name == state; });
  return found == states.end() ? nullptr : &*found;
}

std::vector<size_t> Manifest::factored_files() const {
  std::vector<size_t> by_parameter(parameters.size(), 0);
  for (size_t f = 0; f < files.size(); ++f) {
    for (const int64_t parameter : files[f].factored)
      by_parameter[static_cast<size_t>(parameter)] = f;
  }
  return by_parameter;
}

bool has_in_force(const Manifest& manifest) {
  return std::ranges::any_of(manifest.parameters, [](const Manifest::Parameter& each) {
    return each.find(kInForce) != nullptr;
  });
}

int64_t version_of(const Manifest& manifest) {
  return has_in_force(manifest) ? kVersionInForce : Manifest::kVersion;
}

bool has_manifest(const fs::path& folder) {
  std::error_code ignored;
  return fs::exists(folder / Manifest::kFile, ignored);
}

bool is_rank_file(std::string_view name) {
  return name.starts_with("rank-") && name.find("-of-") != std::string_view::npos &&
         name.ends_with(".safetensors");
}

bool is_save(const fs::path& folder) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (is_rank_file(entry.path().filename().string())) return true;
  }
  std::ifstream file(folder / Manifest::kFile, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  return text.find(Manifest::kFormat) != std::string::npos;
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  const auto path = folder / Manifest::kFile;
  std::string text;
  try {
    text = json_of(manifest).dump();
  } catch (const nlohmann::json::exception& error) {
    throw CheckpointError(
        fmt::format("Cannot write {}: a text is not UTF-8 ({}).", path.string(), error.what()));
  }
  text.pop_back();  // the closing brace
  text += fmt::format("{}{}{}", kChecksum, to_hex(hash_of_text(text)), kEnd);
  write_file(path, text, fail<CheckpointError>);
}

Manifest read_manifest(const fs::path& folder) {
  const auto path = folder / Manifest::kFile;
  const auto text = read_file(path, &fail<DamagedCheckpoint>);
  const auto body = checked(text, path);
  try {
    const auto whole = std::string(body) + "}";
    (void)parse_json(whole);  // parse_json is strict
    const auto json = Json::parse(whole);
    const auto version = json.value("version", int64_t{0});
    if (json.value("format", "") != Manifest::kFormat || version < Manifest::kVersion ||
        version > kVersionInForce) {
      throw CheckpointError(
          fmt::format("is of format \"{}\" {}, and this program reads \"{}\" {} and {}",
                      json.value("format", ""), version, Manifest::kFormat, Manifest::kVersion,
                      kVersionInForce));
    }
    return manifest_of(json);
  } catch (const std::exception& error) {
    throw CheckpointError(fmt::format("'{}' cannot be read: it {}.", path.string(), error.what()));
  }
}

std::string to_text(const Manifest::File& file) { return json_of(file).dump(); }

Manifest::File file_from_text(std::string_view text) { return file_of(Json::parse(text)); }

namespace {

InputFile open_sized(const fs::path& folder, const Manifest::File& entry) {
  InputFile file(folder / entry.name, &fail<DamagedCheckpoint>);
  if (file.size() == entry.sums.bytes) return file;
  throw DamagedCheckpoint(
      fmt::format("'{}' has {} bytes, and {} were written: it is damaged. Load another checkpoint.",
                  file.path().string(), file.size(), entry.sums.bytes));
}

struct Blocks {  // of one file
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Calls body(file, sums, blocks) for each file that has blocks of part `part` of `parts`.
template <class Body>
void for_part(const fs::path& folder, const Manifest& manifest, int part, int parts,
              const Body& body) {
  uint64_t blocks = 0;
  for (const auto& entry : manifest.files) blocks += entry.sums.blocks.size();
  const auto bound = [&](int at) {
    return blocks * static_cast<uint64_t>(at) / static_cast<uint64_t>(parts);
  };
  uint64_t first = 0;  // number of the file's first block among all blocks
  for (const auto& entry : manifest.files) {
    const uint64_t begin = std::max(bound(part), first);
    const uint64_t end = std::min(bound(part + 1), first + entry.sums.blocks.size());
    if (begin < end)
      body(open_sized(folder, entry), entry.sums, Blocks{begin - first, end - first});
    first += entry.sums.blocks.size();
  }
}

}  // namespace

void verify_sizes(const fs::path& folder, const Manifest& manifest) {
  for (const auto& entry : manifest.files) (void)open_sized(folder, entry);
}

void verify(const fs::path& folder, const Manifest& manifest, int part, int parts) {
  std::vector<std::byte> buffer(kSummedBlock);
  for_part(folder, manifest, part, parts, [&](const auto& file, const auto& sums, Blocks blocks) {
    constexpr uint64_t kBlocksAhead = 16;
    for (uint64_t block = blocks.begin; block < blocks.end; ++block) {
      const uint64_t at = block * kSummedBlock;
      // The disk reads a later block of this part while this one is summed.
      if (block + kBlocksAhead < blocks.end)
        file.will_need(at + kBlocksAhead * kSummedBlock, kSummedBlock);
      const auto size = static_cast<size_t>(std::min<uint64_t>(kSummedBlock, sums.bytes - at));
      file.read_at(at, buffer.data(), size);
      if (hash_of({buffer.data(), size}) == sums.blocks[block]) continue;
      throw DamagedCheckpoint(
          fmt::format("'{}' is damaged: bytes {} to {} are not those that were written. Load "
                      "another checkpoint.",
                      file.path().string(), at, at + size));
    }
  });
}

void read_ahead(const fs::path& folder, const Manifest& manifest, int part, int parts) {
  for_part(folder, manifest, part, parts, [&](const auto& file, const auto& sums, Blocks blocks) {
    const uint64_t begin = blocks.begin * kSummedBlock;
    file.will_need(begin, std::min(sums.bytes, blocks.end * kSummedBlock) - begin);
  });
}

void attach(const fs::path& folder, const std::string& name, std::string text) {
  auto manifest = read_manifest(folder);
  manifest.files.front().attached[name] = std::move(text);
  write_manifest(folder, manifest);
}

}  // namespace zero
