#include "zero/engine/memory_copies.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <sstream>
#include <system_error>
#include <utility>

#include "zero/base/error.h"
#include "zero/base/hash.h"
#include "zero/base/memory_limit.h"
#include "zero/checkpoint/whole_folder.h"
#include "zero/comm/agreement.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/gather_texts.h"
#include "zero/comm/job.h"
#include "zero/comm/memory_folder.h"

namespace zero {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kCopy = "copy-";
constexpr const char* kCopies = "copies in memory";

/// A folder of a copy, as its name says.
struct CopyName {
  int64_t step = 0;
  bool whole = false;  ///< it has taken its name, and is not what a save has left behind
};

std::optional<CopyName> copy_named(const fs::path& path) {
  const std::string name = path.filename();
  CopyName found;
  if (!name.starts_with(kCopy)) return {};
  const auto* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kCopy.size(), end, found.step);
  if (error != std::errc()) return {};
  found.whole = stop == end;
  return found;
}

/// Returns a number that tells copies of one step apart: a host that was away may have one that the
/// job has gone back from.
uint64_t id_of(const Manifest& manifest) {
  Hash hash;
  for (const auto& file : manifest.files) hash.add(to_text(file));
  return hash.value();
}

bool is_there(const fs::path& folder, const Manifest::File& file) {
  std::error_code error;
  return fs::file_size(folder / file.name, error) == file.sums.bytes && !error;
}

std::string in_bytes(int64_t bytes) { return format_bytes(static_cast<double>(bytes)); }

/// A copy, on all hosts.
struct Holding {
  size_t files = 0;                       // that the manifest names
  std::map<size_t, std::vector<int>> of;  // by file, the hosts that have it
  std::vector<int> manifests;             // hosts that have the manifest
};

}  // namespace

std::optional<fs::path> MemoryCopies::launcher_folder() {
  const auto path = comm::environment_variable(comm::kMemoryVariable);
  if (!path || path->empty()) return std::nullopt;
  return fs::path(*path);
}

MemoryCopies::MemoryCopies(std::shared_ptr<comm::Group> group, fs::path folder, int64_t spare_bytes)
    : group_(std::move(group)), folder_(std::move(folder)), spare_bytes_(spare_bytes) {
  const auto& topology = group_->topology();
  const auto folders = comm::gather_texts(*group_, folder_.string(), kCopies);
  comm::agree<ConfigError>(*group_, kCopies, [&] {
    const auto first = static_cast<size_t>(group_->rank() - topology.local_rank);
    if (topology.regular && folders[first] != folder_.string()) {
      throw ConfigError(fmt::format(
          "Ranks {} and {} are on one host, but keep copies in memory in {} and {}: two launchers "
          "have started them. Start one for each host, or set ZERO_HOST to another name for each.",
          first, group_->rank(), folders[first], folder_.string()));
    }
    if (!topology.regular)
      throw ConfigError("Copies in memory need hosts with equally many ranks, in order.");
    std::error_code error;
    fs::create_directories(folder_, error);
    if (error) {
      throw ConfigError(fmt::format("Cannot make the folder {} for copies in memory: {}.",
                                    folder_.string(), error.message()));
    }
  });
  if (topology.hosts > 1) files_.emplace(*group_, folder_);
}

MemoryCopies::~MemoryCopies() = default;

fs::path MemoryCopies::folder_of(int64_t step) const {
  return folder_ / fmt::format("{}{}", kCopy, step);
}

// --- Making a copy ---

void MemoryCopies::begin(Engine& engine, int64_t step, const Attached& attached,
                         SaveOptions options) {
  engine.complete_save();
  remover_ = {};  // the memory of the copy before the last is free
  options.on_each_host =
      HostFolders{.make_room = [this](std::span<const int64_t> bytes) { make_room(bytes); },
                  .written = [this](const fs::path& file) { send(file); }};
  step_ = step;
  engine.save(folder_of(step), attached, options);
}

// The first rank of each host speaks for it.
void MemoryCopies::make_room(std::span<const int64_t> bytes) const {
  const auto& topology = group_->topology();
  if (topology.local_rank != 0) return;
  const auto of_host = [&](int host) {
    const auto size = static_cast<size_t>(topology.local_size);
    int64_t sum = 0;
    for (const int64_t each : bytes.subspan(static_cast<size_t>(host) * size, size)) sum += each;
    return sum;
  };
  int64_t needed = of_host(topology.host);
  if (topology.hosts > 1) needed += of_host((topology.host + topology.hosts - 1) % topology.hosts);
  struct statvfs space {};
  const bool known = statvfs(folder_.c_str(), &space) == 0;
  const auto in_folder =
      known ? static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize)
            : INT64_MAX;
  const auto memory = available_memory();
  const bool folder_is_less = in_folder < memory.available;
  if (std::min(in_folder, memory.available) - spare_bytes_ >= needed) return;
  throw CheckpointError(fmt::format(
      "The copy in memory takes {} on the host of rank {}, beside the copy before it, and {} has "
      "{} left{}. Give a place with more ({}), or leave the copies out.",
      in_bytes(needed), group_->rank(), folder_is_less ? folder_.string() : memory.reason,
      in_bytes(std::min(in_folder, memory.available)),
      spare_bytes_ > 0 ? fmt::format(", of which {} are to stay free", in_bytes(spare_bytes_)) : "",
      folder_is_less ? "zero launch --memory-folder; docker run --shm-size"
                     : "more hosts, or a host with more memory"));
}

void MemoryCopies::send(const fs::path& file) const {
  if (!files_) return;
  const auto& topology = group_->topology();
  const int partner = (group_->rank() + topology.local_size) % group_->size();
  files_->send(partner, file, (file.parent_path().filename() / file.filename()).string());
}

void MemoryCopies::complete(Engine& engine) {
  engine.complete_save();
  // A file system takes a moment to free so much memory.
  if (group_->local_rank() != 0) return;
  remover_ = std::jthread([folders = all_but({step_})] { remove(folders); });
}

int64_t MemoryCopies::bytes_of(int64_t step) const {
  int64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_of(step), error)) {
    const auto size = entry.file_size(error);
    if (!error) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

// Returns the folders of other copies, and of those that were not completed.
std::vector<fs::path> MemoryCopies::all_but(const std::set<int64_t>& steps) const {
  std::error_code error;
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const auto name = copy_named(entry.path());
    if (name && !(name->whole && steps.contains(name->step))) others.push_back(entry.path());
  }
  return others;
}

void MemoryCopies::remove(const std::vector<fs::path>& folders) {
  std::error_code error;
  for (const auto& path : folders) {
    fs::remove(path / Manifest::kFile, error);  // without it a copy is none
    fs::remove_all(path, error);
  }
}

// --- Finding and loading one ---

// Returns what this host has, a line for each copy: its step, its id, the number of its files, and
// those that are here; or its step, "!" and a sentence about what is wrong with it.
std::string MemoryCopies::holdings() const {
  std::string text;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    const auto& path = entry.path();
    const auto name = copy_named(path);
    if (!name) continue;
    text += fmt::format("{}", name->step);
    if (!name->whole || !has_manifest(path)) {
      text += fmt::format(" !The copy of step {} in memory was not complete.\n", name->step);
      continue;
    }
    try {
      const auto manifest = read_manifest(path);
      std::string here = fmt::format(" {} {}", id_of(manifest), manifest.files.size());
      for (size_t i = 0; i < manifest.files.size(); ++i) {
        if (is_there(path, manifest.files[i])) here += fmt::format(" {}", i);
      }
      text += here + "\n";
    } catch (const CheckpointError& fault) {
      text += fmt::format(" !{}\n", fault.what());
    }
  }
  return text;
}

std::optional<MemoryCopies::Found> MemoryCopies::newest(std::vector<std::string>* faults) {
  remover_ = {};
  const auto& topology = group_->topology();
  const bool speaks = topology.local_rank == 0;
  const auto texts = comm::gather_texts(*group_, speaks ? holdings() : "", kCopies);
  std::map<std::pair<int64_t, uint64_t>, Holding> copies;  // by step and id
  std::map<int64_t, std::string> wrong;                    // by step
  for (int host = 0; host < topology.hosts; ++host) {
    std::istringstream lines(
        texts[static_cast<size_t>(host) * static_cast<size_t>(topology.local_size)]);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      int64_t step = 0;
      size_t files = 0;
      words >> step;
      if (const auto sentence = line.find('!'); sentence != std::string::npos) {
        wrong.try_emplace(step, line.substr(sentence + 1));
        continue;
      }
      uint64_t id = 0;
      words >> id >> files;
      auto& copy = copies[{step, id}];
      copy.files = files;
      copy.manifests.push_back(host);
      for (size_t file = 0; words >> file;) copy.of[file].push_back(host);
    }
  }
  for (; !copies.empty(); copies.erase(std::prev(copies.end()))) {
    const auto& [key, copy] = *copies.rbegin();
    if (copy.of.size() == copy.files) break;
    wrong.try_emplace(
        key.first,
        fmt::format("The copy of step {} in memory has {} of its {} files on the hosts that "
                    "are left.",
                    key.first, copy.of.size(), copy.files));
  }
  Found found{
      .step = copies.empty() ? 0 : copies.rbegin()->first.first, .folder = {}, .faults = {}};
  for (auto each = wrong.upper_bound(found.step); each != wrong.end(); ++each)
    found.faults.push_back(each->second);
  std::set<int64_t> older;
  for (const auto& each : copies) older.insert(each.first.first);
  if (speaks) remove(all_but(older));
  if (copies.empty()) {
    if (faults != nullptr) *faults = std::move(found.faults);
    return std::nullopt;
  }
  const auto& copy = copies.rbegin()->second;
  found.folder = folder_of(found.step);
  holders_.clear();
  for (const auto& [file, hosts] : copy.of) holders_.push_back(hosts);
  comm::agree<DamagedCheckpoint>(*group_, kCopies, [&] {
    if (!speaks || std::ranges::count(copy.manifests, topology.host) > 0) return;
    remove({found.folder});
    fs::create_directories(found.folder);
    files_->fetch(copy.manifests.front() * topology.local_size,
                  fmt::format("{}{}/{}", kCopy, found.step, Manifest::kFile),
                  found.folder / Manifest::kFile);
  });
  return found;
}

void MemoryCopies::fetch(const Found& found, const std::vector<std::string>& names) const {
  const auto& topology = group_->topology();
  const auto files = read_manifest(found.folder).files;
  for (size_t i = 0; i < files.size(); ++i) {
    const auto& file = files[i];
    if (std::find(names.begin(), names.end(), file.name) == names.end() ||
        is_there(found.folder, file))
      continue;
    // The ranks of a host ask those of the others, each the one at its own place.
    const auto& hosts = holders_[i];
    const int host = hosts[static_cast<size_t>(topology.host) % hosts.size()];
    if (!files_)
      throw DamagedCheckpoint(fmt::format("{} is gone.", (found.folder / file.name).string()));
    files_->fetch(host * topology.local_size + topology.local_rank,
                  fmt::format("{}{}/{}", kCopy, found.step, file.name), found.folder / file.name);
  }
}

Attached MemoryCopies::load(Engine& engine, Found& found) {
  try {
    return load_once(engine, found);
  } catch (const DamagedCheckpoint&) {  // thrown on every rank
    if (!files_ || !forget_damaged(found)) throw;
  }
  return load_once(engine, found);
}

// Removes the files of a copy that are not as they were written. Returns whether the hosts have all
// files without those.
bool MemoryCopies::forget_damaged(Found& found) {
  std::string sentences;
  comm::agree<DamagedCheckpoint>(*group_, kCopies, [&] {
    if (group_->local_rank() != 0) return;
    auto manifest = read_manifest(found.folder);
    const auto files = std::exchange(manifest.files, {});
    for (const auto& file : files) {
      if (!is_there(found.folder, file)) continue;
      manifest.files = {file};
      try {
        verify(found.folder, manifest);
      } catch (const DamagedCheckpoint& fault) {
        sentences += fmt::format("{}\n", fault.what());
        std::error_code error;
        fs::remove(found.folder / file.name, error);
      }
    }
  });
  for (const auto& text : comm::gather_texts(*group_, sentences, kCopies)) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) found.faults.push_back(line);
  }
  const auto again = newest();
  return again && again->step == found.step;
}

Attached MemoryCopies::load_once(Engine& engine, const Found& found) const {
  return engine.load_on_each_host(found.folder, [&](const std::vector<std::string>& names) {
    try {
      fetch(found, names);
    } catch (const DamagedCheckpoint&) {
      throw;
    } catch (const CheckpointError& error) {
      throw DamagedCheckpoint(error.what());
    }
  });
}

void MemoryCopies::drop(int64_t step) {
  remover_ = {};
  if (group_->local_rank() == 0) remove({folder_of(step)});
  group_->barrier(kCopies);
}

void MemoryCopies::clear() {
  remover_ = {};
  if (group_->local_rank() == 0) remove(all_but({}));
  group_->barrier(kCopies);
}

}  // namespace zero
